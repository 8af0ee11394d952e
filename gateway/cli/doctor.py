"""``kvgate doctor``: why a vLLM server did not start, from its log; or whether a running one is set up right."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.planner.diagnosis import Finding

_EXAMPLES = """examples:
  docker logs vllm 2>&1 | kvgate doctor -
  kvgate doctor vllm.log
  kvgate doctor --container vllm
  kvgate doctor --backend http://127.0.0.1:8000
exit status: 0 nothing wrong, 1 a problem was found, 2 wrong usage or nothing to read
"""
_MARKS = {"error": "x", "warning": "!", "info": "-", "ok": "+"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("log", nargs="?", help="a start-up log; - for stdin")
    parser.add_argument("--container", metavar="NAME", help="read `docker logs NAME`")
    parser.add_argument("--backend", metavar="URL", help="check a running server instead")
    parser.add_argument("--api-key", help="bearer token for the server")
    parser.add_argument("--model", metavar="MODEL", help="compare with the plan for this model (default: as served)")
    parser.add_argument("--gpu", help="the card, to compare the running server with the plan")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds for each check of --backend (30)"
    )
    parser.add_argument("--no-request", action="store_true", help="send no generation request with --backend")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print findings."""
    if options.backend is not None:
        return _check_backend(options)
    from gateway.planner.errors import PlannerError

    try:
        text = _log_text(options)
    except PlannerError as error:
        print(f"kvgate doctor: {error}", file=sys.stderr)
        return 2
    if text is None:
        return 2
    from gateway.planner.diagnosis import diagnose, facts
    from gateway.planner.startup_log import read_startup

    found = read_startup(text)
    findings = diagnose(found)
    if options.json:
        print(json.dumps({"facts": facts(found), "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        _print(findings)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    from gateway.planner.screen import columns, wrapped

    width = columns()
    for finding in findings:
        part = " (partial answer)" if finding.partial else ""
        print(wrapped(f"{finding.cause}{part}", width, f"{_MARKS[finding.severity]} ", "  "))
        if finding.change:
            print(wrapped(finding.change, width, "    change: ", "      "))


def _log_text(options: argparse.Namespace) -> str | None:
    from gateway.planner.log_text import log_of_file, log_of_stream, log_text

    if options.container:
        try:
            done = subprocess.run(
                ["docker", "logs", "--tail", "5000", options.container],
                capture_output=True,
                timeout=options.timeout,
                check=False,
            )
        except FileNotFoundError:
            print("kvgate doctor: docker is not installed here; pipe the log in instead.", file=sys.stderr)
            return None
        except subprocess.TimeoutExpired:
            print(f"kvgate doctor: docker did not answer within {options.timeout:g} s.", file=sys.stderr)
            return None
        except OSError as error:
            print(f"kvgate doctor: docker cannot be run: {error.strerror}.", file=sys.stderr)
            return None
        if done.returncode:
            print(f"kvgate doctor: {done.stderr.decode('utf-8', 'replace').strip()}", file=sys.stderr)
            return None
        return log_text(done.stdout + done.stderr)
    if options.log in (None, "-"):
        if options.log is None and sys.stdin.isatty():
            print("kvgate doctor: give a log file, - for stdin, --container or --backend.", file=sys.stderr)
            return None
        text, left_out = log_of_stream(sys.stdin.buffer)
    else:
        try:
            text, left_out = log_of_file(Path(options.log))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            print(f"kvgate doctor: cannot read {options.log}: {reason}.", file=sys.stderr)
            return None
    if left_out:
        print(f"kvgate doctor: the log is long; {left_out >> 20} MiB of its middle were not read.", file=sys.stderr)
    return text


def _check_backend(options: argparse.Namespace) -> int:
    from gateway.planner.backend_check import check_backend

    result = check_backend(
        options.backend,
        api_key=options.api_key,
        model=options.model,
        gpu=options.gpu,
        timeout_s=options.timeout,
        send_request=not options.no_request,
    )
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        for check in result.checks:
            print(f"{_MARKS[check.state]} {check.name:<16} {check.text}")
            if check.change:
                print(f"    change: {check.change}")
    return 1 if any(check.state == "error" for check in result.checks) else 0
