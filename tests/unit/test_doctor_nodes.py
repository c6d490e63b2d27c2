"""Messages of `distributed doctor --num-nodes N` about the findings of the nodes. tests/cli/test_many_nodes.py runs it on machines."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.cli.checks import BAD, OK, Check
from distributed.cli.doctor_nodes import _clocks, _of_each


def facts(*gpus: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"host{rank}",
            "address": f"10.0.0.{rank}",
            "interface": "eth0",
            "cores": 8,
            "gpus": each,
            "versions": {},
        }
        for rank, each in enumerate(gpus)
    ]


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0.0, 0.004, -0.9], [("clocks", OK, "at most 900.0 ms from that of node 0")]),
        ([0.0, 2.5, -0.1], [("node 1 (host1)", BAD, "the clock is 2.5 s ahead of that of node 0: set it with NTP")]),
        (
            [0.0, 1.1, -7200.0],
            [
                ("node 1 (host1)", BAD, "the clock is 1.1 s ahead of that of node 0: set it with NTP"),
                ("node 2 (host2)", BAD, "the clock is 7200.0 s behind that of node 0: set it with NTP"),
            ],
        ),
    ],
)
def test_a_clock_that_is_more_than_a_second_wrong_is_bad(
    offsets: list[float], expected: list[tuple[str, str, str]]
) -> None:
    assert list(_clocks(offsets, facts([], [], []))) == [Check(*each) for each in expected]


@pytest.mark.parametrize(
    ("gpus", "wrong"),
    [
        (([], [], []), {}),
        ((["H100"] * 8, ["H100"] * 8, ["H100"] * 8), {}),
        ((["H100"] * 8, ["H100"] * 7, ["H100"] * 8), {"node 1 (host1)": "has 7 GPUs (H100), unlike the other nodes"}),
        ((["A100"] * 8, ["H100"] * 8, ["H100"] * 8), {"node 0 (host0)": "has 8 GPUs (A100), unlike the other nodes"}),
        ((["H100"], ["H100"], []), {"node 2 (host2)": "has 0 GPUs (none), unlike the other nodes"}),
    ],
)
def test_a_node_with_other_gpus_than_most_is_bad(gpus: tuple[list[str], ...], wrong: dict[str, str]) -> None:
    checks = list(_of_each(facts(*gpus)))

    assert [(each.subject, each.status) for each in checks[:3]] == [(f"node {rank}", OK) for rank in range(3)]
    for each, own in zip(checks, gpus, strict=False):
        assert each.detail.endswith(f"8 cores, {len(own)} x {own[0]}" if own else "8 cores, no GPU")
    assert {each.subject: each.detail for each in checks[3:] if each.status == BAD} == wrong and len(checks) == 3 + len(
        wrong
    )
