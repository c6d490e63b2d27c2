"""The registry entry of the toy engine. Import this before anything that reads the settings."""

from distributed.config import registry

registry.REGISTRY["toy"] = registry.BackendEntry(
    "toy", "toy_engine", "ToyBackend", "toy", preload=(), requires=("numpy",), install="pip install numpy",
    summary="least squares with numpy", single_process=True, cpus_only=True, alone="toy",
)  # fmt: skip
