"""A rank: ``python -m pagedserve.executor.rank SOCKET``, or in a Ray actor.

It loads its shard of the model together with the others, and then runs the steps of the channel,
until it is killed or the engine's process ends.  Its only state is weights and KV pools, so it can
be killed at any time.
"""

import contextlib
import os
import select
import sys
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection

from pagedserve.executor.processes import Answer, RankSpec


def main() -> None:
    """Serve the engine at the other end of a socket."""
    serve(Connection(int(sys.argv[1])))


def serve(connection: Connection) -> None:
    """Serve one engine; ends with ``SystemExit``."""
    spec: RankSpec = connection.recv()
    os.environ["LOCAL_RANK"] = str(spec.device_index)  # read by transformers
    from pagedserve.parallel.group import ExchangeError

    try:
        _serve(spec, connection)
    except ExchangeError as error:
        _say(connection, Answer("lost", str(error)))
        sys.exit(1)
    except EOFError:
        sys.exit(1)  # the engine's process has ended
    except BaseException as error:  # noqa: BLE001  # reported, and the process ends
        traceback.print_exc()
        _say(connection, Answer("failed", f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _serve(spec: RankSpec, connection: Connection) -> None:
    import torch

    from pagedserve.device import choose_device
    from pagedserve.executor.channel import RemoteChannel, StepChannel
    from pagedserve.executor.worker import Worker
    from pagedserve.parallel.group import RankGroup

    torch.set_num_threads(spec.num_threads)
    connection.send(Answer("done"))
    assert connection.recv()[0] == "join"  # noqa: S101  # all ranks have connected
    device = torch.device(choose_device(spec.args.device).type, spec.device_index)
    memory = None if spec.memory is None else os.open(spec.memory, os.O_RDWR)
    group = RankGroup(
        spec.rank,
        spec.size,
        store=spec.store,
        device=device,
        memory=memory,
        check=partial(_check, connection),
    )
    worker = Worker(spec.args, group)
    connection.send(Answer("done"))
    request, (argument,) = connection.recv()
    while request == "determine_num_blocks":
        connection.send(Answer("done", worker.determine_num_blocks(argument)))
        request, (argument,) = connection.recv()
    rank, size = spec.rank, spec.size
    if memory is None:
        channel: StepChannel = RemoteChannel(connection, argument, rank=rank, num_ranks=size)
    else:
        channel = StepChannel(memory, argument, rank=rank, num_ranks=size, connection=connection)
    worker.init_cache(argument, channel)
    connection.send(Answer("done"))
    if memory is not None:  # else the channel notices the end
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    while True:
        worker.forward(channel.take())
        channel.done()


def _check(connection: Connection) -> None:
    """Raise ``EOFError`` if the engine's process has ended, even with unread messages."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        raise EOFError


def _end_with(connection: Connection) -> None:
    """End this process with the engine's: one that waits for a step would not notice."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def _say(connection: Connection, answer: Answer) -> None:
    with contextlib.suppress(OSError):
        connection.send(answer)


if __name__ == "__main__":
    main()
