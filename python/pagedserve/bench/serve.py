"""``pagedserve bench serve``: one run, from its options to its report."""

import asyncio
import contextlib
import gc
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import aiohttp
from tqdm import tqdm

from pagedserve.bench.api import APIS, bearer, request_body
from pagedserve.bench.client import Client, Job, NotReadyError, first_model, open_session
from pagedserve.bench.drive import Run, drive
from pagedserve.bench.figures import Figures, figures_of
from pagedserve.bench.load import BenchRequest, Load, make_load, warmup_requests
from pagedserve.bench.options import BenchOptions
from pagedserve.bench.outcome import Outcome
from pagedserve.bench.report import detailed_fields, result, save, table
from pagedserve.errors import ConfigError, RequestError

# Seconds between two checks of a server that is not ready.
_READY_CHECK_SECONDS = 1.0


def bench_serve(options: BenchOptions) -> None:
    """Measure a server and report.

    Raises:
        ConfigError: No server is ready, no model is known, or the result cannot be written.
        RequestError: A dataset is invalid, or no request was completed.
        KeyboardInterrupt: Ctrl-C; the results so far have been reported.
    """
    load = make_load(options)
    if len(load.requests) < options.num_prompts:
        _say(f"--dataset-path has {len(load.requests)} requests, fewer than --num-prompts")
    _allow_many_connections()
    model, run = asyncio.run(_measure(options, load))
    figures = _figures(options, load, run)
    fields = result(figures, options, model=model, is_timed=load.is_timed, now=datetime.now(UTC))
    if options.save_detailed:
        fields |= detailed_fields(run.outcomes, start=run.start)
    examples = _examples(run.outcomes)
    print(json.dumps(fields) if options.json else table(figures, options, examples))
    if options.save_result or options.append_result:
        save(fields, options)
    if run.is_interrupted:
        raise KeyboardInterrupt
    if not figures.completed:
        raise RequestError(f"none of {len(load.requests)} requests was answered in full")


async def _measure(options: BenchOptions, load: Load) -> tuple[str, Run]:
    """Run the load; return the model, and the run."""
    url = options.server_url()
    timeout_s = options.request_timeout
    async with open_session(headers=_headers(options), timeout_s=timeout_s) as session:
        offered = await _offered_model(options, session)
        model = options.model or offered
        if model is None:
            raise ConfigError(f"the server at {url} names no model: give --model")
        api = APIS[options.backend]
        client = Client(
            session,
            url=url + (options.endpoint or api.endpoint),
            api=api,
            keeps_texts=options.save_detailed,
        )
        name = options.served_model_name or model
        await _warm_up(options, load, client, name)
        jobs = _jobs(options, load.requests, load.due_s, name)
        with _collector_spared():
            return model, await _drive_with_progress(options, client, jobs)


async def _offered_model(options: BenchOptions, session: aiohttp.ClientSession) -> str | None:
    """First model of the server, which may start until --ready-check-timeout-sec."""
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            return await first_model(session, options.server_url())
        except NotReadyError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_READY_CHECK_SECONDS)


async def _warm_up(options: BenchOptions, load: Load, client: Client, model: str) -> None:
    requests = warmup_requests(options, load)
    jobs = _jobs(options, requests, [0.0] * len(requests), model)
    run = await drive(client, jobs, max_concurrency=options.max_concurrency)
    if run.is_interrupted:
        raise asyncio.CancelledError
    failures = [outcome.failure for outcome in run.outcomes if outcome.failure is not None]
    if failures:
        first = failures[0]
        _say(f"{len(failures)} of {len(jobs)} warm-ups failed: {first.kind}: {first.message}")


@contextlib.contextmanager
def _collector_spared() -> Iterator[None]:
    """Freeze existing objects, so that garbage collection does not visit them during a run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _drive_with_progress(options: BenchOptions, client: Client, jobs: Sequence[Job]) -> Run:
    # None lets tqdm show the bar only on a terminal.
    quiet = True if options.disable_tqdm else None
    with tqdm(total=len(jobs), unit="req", disable=quiet, dynamic_ncols=True) as bar:
        failed = 0

        def show(outcome: Outcome) -> None:
            nonlocal failed
            if outcome.failure is not None:
                failed += 1
                bar.set_postfix_str(f"{failed} failed", refresh=False)
            bar.update()

        return await drive(client, jobs, max_concurrency=options.max_concurrency, when_done=show)


def _jobs(
    options: BenchOptions, requests: Sequence[BenchRequest], due_s: Sequence[float], model: str
) -> list[Job]:
    return [
        Job(
            body=request_body(
                APIS[options.backend],
                request.prompt,
                model=model,
                max_tokens=request.num_output_tokens,
                ignore_eos=options.goes_past_eos(),
                extra=options.body_fields(),
            ),
            due_s=due,
            num_input_tokens=request.num_input_tokens,
            headers=options.request_headers(index),
        )
        for index, (request, due) in enumerate(zip(requests, due_s, strict=True))
    ]


def _headers(options: BenchOptions) -> dict[str, str]:
    return {**bearer(options.api_key), **dict(options.header)}


def _allow_many_connections() -> None:
    """Raise the limit of open files to the maximum: each running request needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _figures(options: BenchOptions, load: Load, run: Run) -> Figures:
    return figures_of(
        run.outcomes,
        duration_s=run.end - run.start,
        unfinished=len(load.requests) - len(run.outcomes),
        limits=dict(options.goodput),
        metrics=options.metrics(is_timed=load.is_timed),
        percents=options.metric_percentiles,
    )


def _examples(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Message of the first failure of each kind."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            found.setdefault(outcome.failure.kind, outcome.failure.message)
    return found


def _say(text: str) -> None:
    print(f"pagedserve: {text}", file=sys.stderr)
