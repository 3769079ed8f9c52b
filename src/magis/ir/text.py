"""Programs as text: one printer for every view of a graph, and the parser that reads it back.

    graph "mlp" {
      %0 = input("parameter", "w") : f32[64,128]
      %2 = aten.t.default(%0) : f32[128,64]{1,128}&0   # forward | fc1 | mlp.py:12
      %9 = aten.add_.Tensor(%0, %8, alpha=-0.01) : f32[64,128]&0!
      return "loss"=%7, "grad:w"=%8
    }

A type is `dtype[shape]{strides}+offset^storage_bytes@device&alias!`: strides when not row-major, the offset
when not 0, the storage when larger than the elements, the device when not cpu, `&i` when it shares the
storage of input i, `!` when it writes it. A comment holds direction, module and source line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from magis.errors import PlanError
from magis.ir.args import Arg, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Graph, Node, NodeId, Origin, TensorSpec, Value, contiguous_strides

_SEPARATOR = " | "
_NOTHING = "()"  # the type of an operator without results


def print_graph(graph: Graph, notes: Mapping[NodeId, str] | None = None, origins: bool = True) -> str:
    """The graph as text; `notes` (costs, lifetimes) are appended to the comments and ignored on reading."""
    lines = [f"graph {json.dumps(graph.name)} {{"]
    for node in graph.nodes_in_order():
        line = f"  {print_node(node)}"
        comment = _comment(node.origin if origins else Origin(), (notes or {}).get(node.id, ""))
        lines.append(f"{line}  # {comment}" if comment else line)
    results = (f"{json.dumps(name)}={_value(v)}" for name, v in zip(graph.output_names, graph.outputs))
    lines.append(f"  return {', '.join(results)}")
    return "\n".join([*lines, "}"]) + "\n"


def print_node(node: Node) -> str:
    """One node as a line, without its comment."""
    written = [_arg(value, node) for value in node.args]
    written += [f"{name}={_arg(value, node)}" for name, value in node.kwargs]
    types = ", ".join(print_spec(spec) for spec in node.outputs) or _NOTHING
    draw = "" if node.stream is None else f" draw {node.stream}"
    return f"%{node.id} = {node.op}({', '.join(written)}) : {types}{draw}"


def print_spec(spec: TensorSpec | None) -> str:
    """A tensor type as text; `-` for a result that is no tensor."""
    if spec is None:
        return "-"
    text = f"{spec.dtype.value}[{','.join(map(str, spec.shape))}]"
    if not spec.is_contiguous:
        text += f"{{{','.join(map(str, spec.strides))}}}"
    if spec.offset:
        text += f"+{spec.offset}"
    if spec.storage_bytes != (0 if spec.alias_of is not None else spec.nbytes):
        text += f"^{spec.storage_bytes}"
    if spec.device != "cpu":
        text += f"@{spec.device}"
    if spec.alias_of is not None:
        text += f"&{spec.alias_of}" + ("!" if spec.writes else "")
    return text


def _comment(origin: Origin, note: str) -> str:
    if origin == Origin() and not note:
        return ""
    parts = [_plain(part) for part in (origin.direction, origin.module, origin.line)]
    return _SEPARATOR.join([*parts, note] if note else parts)


def _plain(text: str) -> str:
    """Text that stays on its line and within its part of a comment."""
    return "".join(c if c.isprintable() and c != _SEPARATOR.strip() else " " for c in text).strip()


def _value(value: Value) -> str:
    return f"%{value.node}" + (f".{value.output}" if value.output else "")


def _arg(value: Arg, node: Node) -> str:
    match value:
        case Slot(index):
            return _value(node.inputs[index])
        case Symbol(kind, name):
            return f"@{kind}.{name}"
        case DType():
            return value.value
        case str():
            return json.dumps(value)
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case tuple():
            inner = ", ".join(_arg(item, node) for item in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<value>%\d+(?:\.\d+)?) | (?P<string>"(?:[^"\\]|\\.)*") | (?P<symbol>@\w+\.[\w:.]+)
    | (?P<number>-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf\b|nan\b)) | (?P<word>[A-Za-z_]\w*) | (?P<mark>[(),=])
    )""",
    re.VERBOSE,
)
_NODE = re.compile(r"\s*%(\d+) = ([\w.:]+)\((.*)\) : (\S+(?:, \S+)*?)(?: draw (\d+))?\s*$")
_SPEC = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)\})?(?:\+(\d+))?(?:\^(\d+))?(?:@([\w:]+))?(?:&(\d+)(!)?)?$")
_OUTPUT = r'("(?:[^"\\]|\\.)*")=(%\d+(?:\.\d+)?)'
_DTYPES = {dtype.value: dtype for dtype in DType}
_WORDS: dict[str, Arg] = {"None": None, "True": True, "False": False}


def parse_graph(text: str) -> Graph:
    """Reads what `print_graph` wrote. Raises PlanError naming the first line that cannot be read."""
    lines = text.strip().splitlines()
    name = ""
    nodes: dict[NodeId, Node] = {}
    outputs: list[tuple[str, Value]] = []
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                name = _graph_name(line)
            elif line.startswith("  return"):
                outputs = list(_outputs(line))
            elif line != "}":
                node = _parse_node(line)
                if node.id in nodes:
                    raise ValueError(f"%{node.id} is defined twice")
                nodes[node.id] = node
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PlanError(f"line {number} of the program cannot be read ({error}): {line.strip()[:80]}") from None
    if not lines or lines[-1] != "}":
        raise PlanError("the program is cut off: its last line is missing")
    nodes = dict(sorted(nodes.items()))
    return Graph(nodes, tuple(v for _, v in outputs), tuple(n for n, _ in outputs), name)


def _graph_name(line: str) -> str:
    match = re.fullmatch(r"graph (\".*\") \{", line)
    if not match:
        raise ValueError('expected `graph "name" {`')
    return str(json.loads(match[1]))


def _outputs(line: str) -> Iterator[tuple[str, Value]]:
    written = line.removeprefix("  return").strip()
    if not re.fullmatch(rf"(?:{_OUTPUT}(?:, {_OUTPUT})*)?", written):
        raise ValueError('expected `return "name"=%id, ...`')
    for name, value in re.findall(_OUTPUT, written):
        yield str(json.loads(name)), _read_value(value)


def _read_value(text: str) -> Value:
    node, _, output = text[1:].partition(".")
    return Value(NodeId(int(node)), int(output or 0))


def _split_comment(line: str) -> tuple[str, str]:
    """Code and comment of a line; a `#` inside a string is not a comment."""
    code = re.match(r"(?:[^\"#]|\"(?:[^\"\\]|\\.)*\")*", line)
    end = code.end() if code else len(line)
    return line[:end].rstrip(), line[end:].removeprefix("# ")


def _parse_node(line: str) -> Node:
    code, comment = _split_comment(line)
    match = _NODE.match(code)
    if not match:
        raise ValueError("expected `%id = operator(arguments) : types`")
    node_id, op, written, types, draw = match.groups()
    reader = _ArgReader(written)
    args, kwargs = reader.read_call()
    specs = () if types == _NOTHING else tuple(_parse_spec(spec) for spec in types.split(", "))
    parts = comment.split(_SEPARATOR) if comment else []
    origin = Origin(parts[1], parts[2], parts[0]) if len(parts) >= 3 else Origin()
    stream = int(draw) if draw else None
    return Node(NodeId(int(node_id)), op, tuple(reader.values), specs, args, kwargs, stream, origin)


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(",")) if text else ()


def _parse_spec(text: str) -> TensorSpec | None:
    if text == "-":
        return None
    match = _SPEC.match(text)
    if not match:
        raise ValueError(f"not a tensor type: {text}")
    dtype, shape_text, strides, offset, storage, device, alias, writes = match.groups()
    shape = _ints(shape_text)
    own = 0 if alias else TensorSpec(shape, shape, _DTYPES[dtype], 0).nbytes
    return TensorSpec(
        shape=shape,
        strides=contiguous_strides(shape) if strides is None else _ints(strides),
        dtype=_DTYPES[dtype],
        storage_bytes=int(storage) if storage else own,
        alias_of=int(alias) if alias else None,
        writes=bool(writes),
        offset=int(offset or 0),
        device=device or "cpu",
    )


class _ArgReader:
    """Reads a call's arguments; tensors become slots, numbered as they appear."""

    def __init__(self, text: str) -> None:
        self.values: list[Value] = []
        self._tokens = list(_tokens(text))
        self._at = 0

    def read_call(self) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        while self._peek() is not None:
            if self._peek(1) == ("mark", "="):
                name = self._next()[1]
                self._next()
                kwargs.append((name, self._read()))
            else:
                args.append(self._read())
            if self._peek() is not None:
                self._expect(",")
        return tuple(args), tuple(kwargs)

    def _peek(self, ahead: int = 0) -> tuple[str, str] | None:
        place = self._at + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def _next(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, mark: str) -> None:
        if self._next() != ("mark", mark):
            raise ValueError(f"expected `{mark}`")

    def _read(self) -> Arg:
        kind, text = self._next()
        match kind:
            case "value":
                value = _read_value(text)
                if value not in self.values:
                    self.values.append(value)
                return Slot(self.values.index(value))
            case "string":
                return str(json.loads(text))
            case "symbol":
                symbol, _, name = text[1:].partition(".")
                return Symbol(symbol, name)
            case "number":
                return float(text) if re.search(r"[.en]", text) else int(text)
            case "word":
                return self._read_word(text)
        if text != "(":
            raise ValueError(f"unexpected `{text}`")
        return self._read_tuple()

    def _read_word(self, word: str) -> Arg:
        if word == "complex":
            self._expect("(")
            real, imag = self._read_tuple()
            return complex(real, imag)  # type: ignore[arg-type]
        return _WORDS[word] if word in _WORDS else _DTYPES[word]

    def _read_tuple(self) -> tuple[Arg, ...]:
        items: list[Arg] = []
        while self._peek() != ("mark", ")"):
            items.append(self._read())
            if self._peek() == ("mark", ","):
                self._next()
        self._next()
        return tuple(items)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if not match or not match.lastgroup:
            raise ValueError(f"unexpected text at `{text[at : at + 20]}`")
        at = match.end()
        word = match[match.lastgroup]
        kind = "number" if match.lastgroup == "word" and word in ("inf", "nan") else match.lastgroup
        yield kind, word
