"""How long the analysis for splitting takes: D-Graph, strict components, Algorithm 1, F-Tree (ADR 9).

    python benchmarks/fission.py [MODEL ...]

CPU seconds. Default: hf-gptneo at its full size, on fake tensors. Also how long it takes to price the whole step in 4
parts, first (types of parts are asked of PyTorch) and again.
"""

from __future__ import annotations

import argparse
import time

from magis.api.models import resolve
from magis.api.splits import loosened
from magis.aten.infer import infer
from magis.cost.device import DEVICES
from magis.cost.model import AnalyticCost
from magis.fission.analyze import Analyzer, hot_bytes, nested
from magis.fission.dim_graph import dim_graph
from magis.fission.tree import Program
from magis.lower.lower import lower
from magis.rules.split import split
from magis.schedule.baseline import eager_order
from magis.search.splitting import Prices, Splitter
from magis.sim.timeline import no_workspace, timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["hf-gptneo"])
    for model in parser.parse_args().models:
        analysed(model)


def analysed(model: str) -> None:
    """Times the analysis of one model."""
    program, _ = loosened(resolve(model, {}, 0).capture().graph)
    graph = program.graph
    hotspots = timeline(lower(Program(graph), eager_order(graph))).hotspots
    clock = [time.process_time()]
    dims = dim_graph(graph)
    clock.append(time.process_time())
    components = dims.strict_components
    clock.append(time.process_time())
    candidates = Analyzer(dims, hot_bytes(graph, hotspots)).candidates()
    clock.append(time.process_time())
    forest = nested(candidates)
    clock.append(time.process_time())
    names = ("D-Graph", "strict components", "Algorithm 1", "F-Tree")
    print(f"{model}: {len(graph.nodes)} nodes, {len(list(dims.vertices))} vertices, {len(components)} components")
    for name, begin, end in zip(names, clock, clock[1:]):
        print(f"  {name:18} {end - begin:6.3f} s")
    print(f"  {'together':18} {clock[-1] - clock[0]:6.3f} s; {len(candidates)} candidates in {len(forest)} trees")
    cost = AnalyticCost(DEVICES["rtx3090"])
    splitter = Splitter(Prices(cost.latency_s, no_workspace, infer))
    region = max(forest, key=lambda fission: len(fission.region))
    whole = Program(graph)
    for word in ("first", "again"):
        start = time.process_time()
        change = split(whole, type(region)(region.region, region.cuts, region.length, min(4, region.length)))
        splitter.state(change.program)
        print(f"  whole step in 4 parts priced, {word}: {time.process_time() - start:.3f} s")


if __name__ == "__main__":
    main()
