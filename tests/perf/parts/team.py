"""Processes that do the same kind of work at the same time: threads would share one interpreter lock."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

Make = Callable[..., Callable[..., Any]]


class Team:
    """So many processes, each of which has called `make(*arguments)` for the function that does the work."""

    def __init__(self, number: int, make: Make, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = list[Connection](), list[Any]()
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def order(self, each: Callable[[int], tuple[Any, ...]]) -> None:
        """Have every process call its function with `each(its place)`, and do not wait."""
        for place, pipe in enumerate(self._pipes):
            pipe.send(each(place))

    def answers(self) -> list[Any]:
        """Wait for what the functions return. Raises what one of them has raised."""
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def __enter__(self) -> Self:
        self.answers()
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if error is not None:
                process.terminate()
            else:
                pipe.send(None)
            process.join()


def _serve(pipe: Connection, make: Make, arguments: tuple[Any, ...]) -> None:
    try:
        work = make(*arguments)
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            pipe.send(work(*order))
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
