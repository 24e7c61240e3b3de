"""ACL graphs: capture what is launched, replay it on the same memory.

Stands in for ``torch.npu.NPUGraph`` and what vllm-ascend's compilation/acl_graph.py
uses beside it: events that a replay waits for, and task groups, whose operators get
new arguments before each replay. Capturing runs the kernels too, where a device would
only note them: their results are overwritten by the first replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ascend.emulator.device import Tape, alias_on_host, record_on
from ascend.emulator.launch_log import record

Run = Callable[[Any, Any], Any]


@dataclass
class AtenCalls:
    """A stretch of the graph's tape."""

    first: int
    last: int


@dataclass
class OperatorCall:
    """One of our operators, whose arguments a task update may replace."""

    name: str
    run: Run
    arguments: Any
    keywords: Any
    results: Any


@dataclass
class EventAction:
    """Wait for an event, or reset it."""

    event: "ExternalEvent"
    is_wait: bool


Item = AtenCalls | OperatorCall | EventAction


class NPUGraph:
    """Kernels in the order of their launch, to be run again without Python's model."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.items: list[Item] = []
        self._tape = Tape()
        self._recorded = 0  # calls on the tape that are among the items
        self._position = 0

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        """Record everything that is launched from here on."""
        global _capturing
        _capturing = self
        record_on(self._tape)

    def capture_end(self) -> None:
        """Record no more."""
        global _capturing
        self.close_stretch()
        record_on(None)
        _capturing = None

    def replay(self) -> None:
        """Launch all of it; waits for no event, but goes on when that is recorded."""
        self._position = 0
        _pending.append(self)
        _run_pending()

    def reset(self) -> None:
        """Forget the kernels."""
        self.items.clear()

    def pool(self) -> tuple[int, int]:
        """The memory pool, of which there is one."""
        return graph_pool_handle()

    def close_stretch(self) -> None:
        """Make an item of the calls on the tape since the last one."""
        if len(self._tape) > self._recorded:
            self.items.append(AtenCalls(self._recorded, len(self._tape)))
            self._recorded = len(self._tape)

    def add(self, item: Item) -> None:
        """Put an item behind what was launched so far."""
        self.close_stretch()
        self.items.append(item)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Launch in this block without recording: an operator's own steps."""
        global _capturing
        record_on(None)
        _capturing = None
        try:
            yield
        finally:
            _capturing = self
            record_on(self._tape)

    def advance(self) -> bool:
        """Replay from where it stands; False if it has to wait for an event."""
        while self._position < len(self.items):
            item = self.items[self._position]
            if isinstance(item, AtenCalls):
                self._tape.replay(item.first, item.last)
            elif isinstance(item, OperatorCall):
                record(item.name, (item.arguments, item.keywords))
                _copy(item.run(item.arguments, item.keywords), item.results)
            elif item.is_wait and not item.event.is_recorded:
                return False
            elif not item.is_wait:
                item.event.is_recorded = False
            self._position += 1
        return True


class ExternalEvent:
    """An event that a graph waits for and that is recorded outside of it."""

    def __init__(self, *options: Any, **more: Any) -> None:
        self.is_recorded = False

    def record(self, stream: Any = None) -> None:
        """Let graphs that wait for it go on."""
        self.is_recorded = True
        _run_pending()

    def wait(self, stream: Any = None) -> None:
        """Make the graph being captured wait here."""
        if _capturing is not None:
            _capturing.add(EventAction(self, is_wait=True))

    def reset(self, stream: Any = None) -> None:
        """Unrecord it: now, or where the graph being captured stands."""
        if _capturing is not None:
            _capturing.add(EventAction(self, is_wait=False))
        else:
            self.is_recorded = False


_capturing: NPUGraph | None = None
_pending: list[NPUGraph] = []  # replays that were begun, in order
_group_start = 0  # first item of the task group being captured
_updating: Iterator[OperatorCall] | None = None  # calls whose arguments come next


def record_or_run(name: str, run: Run, arguments: Any, keywords: Any) -> Any:
    """Call one of our operators, and note it for the graph being captured.

    In a task update nothing runs: the arguments replace those of the next call in the
    group, whose old results are returned.
    """
    if _updating is not None:
        call = next(_updating)
        if call.name != name:
            raise RuntimeError(f"a graph task of {call.name} was updated with {name}")
        call.arguments, call.keywords = arguments, keywords
        return call.results
    record(name, (arguments, keywords))
    if _capturing is None:
        return run(arguments, keywords)
    graph = _capturing
    with graph.paused():
        results = run(arguments, keywords)
    graph.add(OperatorCall(name, run, arguments, keywords, results))
    return results


def graph_pool_handle() -> tuple[int, int]:
    """A memory pool: there is no other."""
    return (0, 1)


@contextmanager
def graph(npu_graph: NPUGraph, pool: Any = None, **options: Any) -> Iterator[NPUGraph]:
    """Capture what is launched in the block."""
    npu_graph.capture_begin(pool)
    try:
        yield npu_graph
    finally:
        npu_graph.capture_end()


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured."""
    return _capturing is not None


def graph_task_group_begin(stream: Any) -> None:
    """Begin a group of operators that will be updated together."""
    global _group_start
    assert _capturing is not None, "a task group is part of a graph"
    _capturing.close_stretch()
    _group_start = len(_capturing.items)


def graph_task_group_end(stream: Any) -> list[OperatorCall]:
    """End the group; its handle is the list of its operators."""
    assert _capturing is not None, "a task group is part of a graph"
    items = _capturing.items[_group_start:]
    return [item for item in items if isinstance(item, OperatorCall)]


def graph_task_update_begin(stream: Any, handle: list[OperatorCall]) -> None:
    """Give the operators of a group new arguments: call each again, in order."""
    global _updating
    _updating = iter(handle)


def graph_task_update_end(stream: Any) -> None:
    """All of the group have theirs."""
    global _updating
    _updating = None


def install_graphs() -> None:
    """Put all of the above in the place of torch_npu's."""
    import torch_npu

    for namespace in (torch.npu, torch_npu.npu):
        for stand_in in (
            *(NPUGraph, ExternalEvent, graph, graph_pool_handle),
            *(is_current_stream_capturing, graph_task_group_begin),
            *(graph_task_group_end, graph_task_update_begin, graph_task_update_end),
        ):
            setattr(namespace, stand_in.__name__, stand_in)


def _run_pending() -> None:
    """Replay in order; a later graph does not overtake one that waits."""
    while _pending and _pending[0].advance():
        _pending.pop(0)


def _copy(results: Any, to: Any) -> None:
    pairs = zip(tree_leaves(results), tree_leaves(to), strict=True)
    for new, old in pairs:
        if torch.is_tensor(old) and new is not old and old.numel():
            with torch.inference_mode():
                alias_on_host(old).copy_(alias_on_host(new))
