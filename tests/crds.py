"""Definitions of an operator's objects (CustomResourceDefinition). Those of two releases are in `tests/data/operators`.

`CRDS=DIR` names a directory with more of them, as `kubectl get crd NAME --output yaml` prints them.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import yaml

OURS = Path(__file__).parent / "data" / "operators"


def definitions(kind: str) -> list[dict[str, Any]]:
    """Return the definitions of a kind of object, one for each release of the operator."""
    found = [json.loads(gzip.decompress(file.read_bytes())) for file in sorted(OURS.glob("*.json.gz"))]
    if given := os.environ.get("CRDS"):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the files are long
        for file in sorted(Path(given).glob("*.yaml")):
            found += yaml.load_all(file.read_text(), loader)
    return [document for document in found if document["spec"]["names"]["kind"] == kind]


def errors_of(document: dict[str, Any], definition: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object. A field that is not in the definition is an error too."""
    wanted = document["apiVersion"].rpartition("/")[2]
    (schema,) = [
        version["schema"]["openAPIV3Schema"] for version in definition["spec"]["versions"] if version["name"] == wanted
    ]
    strict = _strict(schema)
    strict["properties"]["metadata"] = {"type": "object"}  # the definition leaves it to Kubernetes
    return [error.message for error in jsonschema.Draft202012Validator(strict).iter_errors(document)]


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {name: value for name, value in schema.items() if not name.startswith("x-") and name != "format"}
    if "properties" in schema:
        kept["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            kept[name] = _strict(schema[name])
    return kept
