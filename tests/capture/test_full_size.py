"""Full-size models on the meta device: captured in seconds, and nothing is allocated."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

PROGRAM = """
import resource, sys
import torch
from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.zoo import build

torch.set_num_threads(1)
with torch.device("meta"):
    capture(workload(build("hf-bert-toy"), "first"))  # imports and caches
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.device("meta"):
    made = build(sys.argv[1])
update = torch.optim.AdamW(made[0].parameters()) if sys.argv[2] == "adamw" else None
captured = capture(workload((*made[:3], update), sys.argv[1]))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
resident = sum(spec.storage_bytes for node in captured.graph.inputs for spec in node.outputs)
print(len(captured.graph.nodes), resident, grown)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "update", "least_resident"),
    [("hf-bert", "none", 430e6), ("hf-bert", "adamw", 1300e6), ("hf-gptneo", "none", 2.6e9)],
)
def test_nothing_is_allocated(model: str, update: str, least_resident: float) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, model, update], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    nodes, resident, grown = map(int, done.stdout.split())
    assert nodes > 1000
    assert resident > least_resident
    assert grown < 300e6, f"capturing {model} grew the process by {grown / 1e6:.0f} MB"
