"""What ``@action`` returns: the function, and the verbs that enqueue it."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack

from penstock.client import default
from penstock.client.default import Task
from penstock.protocol.errors import RpcError
from penstock.protocol.options import EnqueueOptions
from penstock.protocol.spelling import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])


class Bound(dict[str, Any], Generic[R]):
    """Made by ``resize.bind(...)``: a call to be enqueued, with its options; the parameters of ``enqueue``.

    ``enqueue_many`` takes any number of them, that of the action, of a client, or of a transaction.
    """


@dataclass(eq=False, repr=False)
class Action(Generic[P, R]):
    """A handler: called as the function that it is, or enqueued with the same arguments without the context.

    The arguments are written as JSON and checked as the worker will check them: the methods raise InvalidParams before
    anything is sent, and TypeError for a value that has no form in JSON. Those that end in ``_sync`` block. The api is
    the one that `penstock.connect` or the environment names; a transaction of yours needs none.
    name: of the action. function: the handler itself. options: of the tasks that it enqueues.
    """

    name: str
    function: Callable[..., Any]
    _payload: Callable[[Sequence[Any], Mapping[str, Any]], Any]  # arguments as a checked payload
    _read: Callable[[int, Any], R]  # a task's id and its result as the annotated type
    options: EnqueueOptions = field(default_factory=EnqueueOptions)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<action {self.name!r}>"

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]  # found again where it is defined, as a function is

    def with_options(self, **options: Unpack[EnqueueOptions]) -> Self:
        """Return the action with options for the tasks that it enqueues, beside those that it has.

        They are those of `Client.enqueue`. Raises TypeError for an unknown one.
        """
        for name in options.keys() - EnqueueOptions.__annotations__.keys():
            raise TypeError(f"no option is named {name!r}{did_you_mean(name, EnqueueOptions.__annotations__)}")
        return replace(self, options=self.options | options)

    def bind(self, /, *args: P.args, **kwargs: P.kwargs) -> Bound[R]:
        """Return the call with its options, to be given to an ``enqueue_many``."""
        return Bound({"action": self.name, "payload": self._payload(args, kwargs), **self.options})

    def task(self, task_id: int) -> Task[R]:
        """Return the handle of a task of this action that was enqueued before."""
        return Task(task_id, _read=self._read)

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Task[R]:
        """Add a task; it is stored when this returns. Raises as `AsyncClient.enqueue`."""
        bound = self.bind(*args, **kwargs)
        return self._task(await (await default.async_client()).enqueue(**bound))

    def enqueue_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Task[R]:
        """As ``enqueue``."""
        return self._task(default.client().enqueue(**self.bind(*args, **kwargs)))

    async def enqueue_in(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Task[R]:
        """Add a task in the transaction of a connection for asyncio, as `penstock.enqueue` does."""
        from penstock.tasks import transactional  # with the settings, which take long to load

        return self._task(await transactional.enqueue(connection, **self.bind(*args, **kwargs)))

    def enqueue_in_sync(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Task[R]:
        """Add a task in the transaction of a blocking connection, as `penstock.enqueue_sync` does."""
        from penstock.tasks import transactional

        return self._task(transactional.enqueue_sync(connection, **self.bind(*args, **kwargs)))

    async def enqueue_many(self, calls: Iterable[Bound[R] | Mapping[str, Any]]) -> list[Task[R]]:
        """Add tasks with few requests: each a ``bind(...)``, with options of its own, or a mapping of parameters.

        Raises Unfinished when some were not accepted, with the answers so far and the calls that are left.
        """
        bound = [self._bound(call) for call in calls]
        return self._tasks(bound, await (await default.async_client()).enqueue_many(bound))

    def enqueue_many_sync(self, calls: Iterable[Bound[R] | Mapping[str, Any]]) -> list[Task[R]]:
        """As ``enqueue_many``."""
        bound = [self._bound(call) for call in calls]
        return self._tasks(bound, default.client().enqueue_many(bound))

    def _bound(self, call: Bound[R] | Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(call, Bound):
            return self.bind(**call)  # type: ignore[call-arg]
        if call["action"] != self.name:
            raise TypeError(f"a call of {call['action']!r} is not one of {self.name!r}")
        return call

    def _task(self, answer: Mapping[str, Any]) -> Task[R]:
        return Task(answer["id"], answer["duplicate"], answer.get("replaced"), _read=self._read)

    def _tasks(self, calls: Sequence[Mapping[str, Any]], answers: Sequence[Any]) -> list[Task[R]]:
        errors = [answer for answer in answers if isinstance(answer, RpcError)]
        if errors:
            from penstock.client.exchanges import Unfinished  # loaded by now, and else not needed

            refused = [call for call, answer in zip(calls, answers, strict=True) if isinstance(answer, RpcError)]
            raise Unfinished(f"{len(errors)} of {len(calls)} tasks were refused: {errors[0]}", answers, refused)
        return [self._task(answer) for answer in answers]


class ActionFunction(Action[P, R], Generic[P, R, Function]):
    """An action whose call has the types of its function, for type checkers."""

    if TYPE_CHECKING:

        @property
        def __call__(self) -> Function: ...
