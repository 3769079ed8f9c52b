"""What running, compiling and simulating a routine costs beyond the operators themselves.

    python benchmarks/executor.py [--model hf-bert-toy] [--batch 1] [--seq 4] [--repeats 30]

A tiny batch makes the step bound by overhead. Prints, for one step on one thread, the least CPU time over the
repeats of eager PyTorch (forward and autograd), `fx.Interpreter`, and generated code, the latter also with operators
called through `OpOverload.__call__`; then seconds to generate and compile per 1000 nodes, and instructions simulated
per second. The variants alternate, so that a loaded machine slows all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from magis import zoo
from magis.aten.convert import overload, python_literal
from magis.backend.codegen import generate
from magis.backend.meters import cpu_time_s
from magis.backend.runtime import compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, workload
from magis.fission.tree import Program
from magis.ir.args import Arg, Slot
from magis.ir.graph import Graph, Value
from magis.lower.lower import lower
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency


def fx_module(graph: Graph) -> torch.fx.GraphModule:
    """The graph as PyTorch's own."""
    fx = torch.fx.Graph()
    made: dict[Value, torch.fx.Node] = {}
    for node in graph.nodes.values():
        if node.is_input:
            made[Value(node.id)] = fx.placeholder(f"in_{node.id}")
            continue
        tensors = [made[value] for value in node.inputs]
        args = tuple(_fx_argument(value, tensors) for value in node.args)
        kwargs = {name: _fx_argument(value, tensors) for name, value in node.kwargs}
        call = fx.call_function(overload(node.op), args, kwargs)
        returns = overload(node.op)._schema.returns
        single = len(returns) == 1 and not str(returns[0].type).startswith("List[")
        for index, spec in enumerate(node.outputs):
            if spec is not None:
                item = call if single else fx.call_function(_item, (call, index))
                made[Value(node.id, index)] = item
    fx.output(tuple(made[value] for value in graph.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), fx)


def _item(results: Any, index: int) -> Any:
    return results[index]


def _fx_argument(value: Arg, tensors: list[torch.fx.Node]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, tuple):
        return [_fx_argument(item, tensors) for item in value]
    return python_literal(value)


def eager_step(given: Workload) -> Callable[[], object]:
    """Forward and backward as a user writes them."""
    parameters = [p for p in given.model.parameters() if p.requires_grad]

    def step() -> object:
        loss = given.call(given.batch)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def variants(given: Workload, captured: Captured) -> dict[str, Callable[[], object]]:
    """The same step run in different ways."""
    inputs = [tensor.detach() for tensor in captured.bind(given)]
    routine = lower(Program(captured.graph), captured.schedule)
    compiled = compile_routine(routine)
    source = generate(routine)
    by_name: dict[str, Any] = {**source.names, **_through_python(source.names, captured.graph)}
    exec(source.text, by_name)
    module = fx_module(captured.graph)
    interpreter = torch.fx.Interpreter(module)

    def without_grad(run: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(run)

    return {
        "eager": eager_step(given),
        "fx.Interpreter": without_grad(lambda: interpreter.run(*inputs)),
        "fx generated": without_grad(lambda: module(*inputs)),
        "ours, OpOverload()": without_grad(lambda: by_name["step"](list(inputs))),
        "ours": without_grad(lambda: compiled(list(inputs))),
    }


def _through_python(names: Any, graph: Graph) -> dict[str, Any]:
    """The operators' globals bound to the overloads instead of what they forward to."""
    overloads = [overload(op) for op in {node.op for node in graph.nodes.values() if not node.is_input}]
    return {name: found for name, value in names.items() for found in overloads if found._op is value}


def least(run: Callable[[], object], repeats: int = 5) -> float:
    """The least wall time of a few calls, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf-bert-toy")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = workload(zoo.build(options.model, batch=options.batch, seq=options.seq), options.model)
    captured = capture(given)
    nodes = len(captured.graph.nodes) - len(captured.graph.inputs)
    runs = variants(given, captured)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            times[name].append(cpu_time_s(run))
    print(f"{options.model}, batch {options.batch}, {options.seq} tokens: {nodes} operators, one thread")
    best = {name: min(values) for name, values in times.items()}
    for name, value in best.items():
        each, ratio = value / nodes * 1e6, value / best["eager"]
        print(f"  {name:20} {value * 1e3:7.2f} ms  {each:5.1f} us an operator  {ratio:.2f}x")
    program = Program(captured.graph)
    routine = lower(program, captured.schedule)
    text = generate(routine).text
    for name, run in {
        "lower": lambda: lower(program, captured.schedule),
        "generate": lambda: generate(routine),
        "compile": lambda: compile(text, "<step>", "exec"),
    }.items():
        print(f"  {name:20} {least(run) / nodes * 1e6:7.2f} ms per 1000 nodes")
    rate = len(routine.body) / least(lambda: simulate(routine, no_latency), 20)
    print(f"  {'simulate':20} {rate:7,.0f} instructions/s")


if __name__ == "__main__":
    main()
