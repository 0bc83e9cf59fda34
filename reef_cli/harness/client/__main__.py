"""The wrapper's commands. Anything that is not one of them goes to the agent untouched.

reef-pi [agent arguments]                run the agent, keep receipts
reef-pi report --score S --feedback F    report every run not reported yet (--last: the newest only)
reef-pi ask "words"                      request a change of the harness
reef-pi update [--release ID] | setup ITEM | diff | doctor | uninstall
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import agent, installer, requires, spool, sync
from .session import Session
from .store import Place, Refused, get_json, put_json


def say(text: str) -> None:
    """Narration goes to stderr: stdout is the agent's data."""
    sys.stderr.write(f"reef: {text}\n")


def place_of(root: str) -> Place:
    folder = Path(root)
    return Place(folder.parent.parent.parent, folder.parent.parent.name, folder.name)


def report(session: Session, args: argparse.Namespace) -> int:
    """One report per run, citing all its receipts, oldest run first; a run is reported exactly once."""
    body: dict[str, Any] = {}
    if args.score is not None:
        if not math.isfinite(args.score):
            raise Refused("--score must be a finite number", code=2)
        body["score"] = args.score
    if args.feedback:
        body["feedback"] = args.feedback
    if not body:
        raise Refused("give --score, --feedback or both", code=2)
    only = args.run or (_newest(session.place.spool) if args.last else None)
    sent = 0
    for claim in spool.claim(session.place.spool, only):
        if not claim.receipts:
            claim.sent()
            continue
        references = list(dict.fromkeys(item["receipt"] for item in claim.receipts))
        try:
            session.gateway.call(
                "POST", "/reef/report", {**body, "references": references, "agent_record_id": f"run:{claim.run}"}
            )
        except Refused as error:
            if error.code != 4:
                claim.release()
                raise
            # The id is taken by other content: a reporter that died had already sent this run.
        except BaseException:
            claim.release()
            raise
        claim.sent()
        sent += 1
        say(f"reported run {claim.run} ({len(references)} receipts)")
    if not sent:
        say("no run waits to be reported")
    return 0


def _newest(folder: Path) -> str | None:
    names = sorted(path.name.rpartition(".")[0] for path in folder.glob("*.done"))
    return names[-1] if names else "none"


def ask(session: Session, args: argparse.Namespace) -> int:
    """A change request in words."""
    body = {"text": " ".join(args.words), "release_id": session.spec["release_id"]}
    answer = session.gateway.json("POST", "/reef/train", {key: value for key, value in body.items() if value})
    say(f"asked; the request is {answer.get('agent_record_id', 'stored')}")
    return 0


def update(session: Session, args: argparse.Namespace) -> int:
    return session.update(args.release)


def setup(session: Session, args: argparse.Namespace) -> int:
    """Check off a service or permission that a person has seen to, also before the release that asks for it is installed."""
    known = {requires.label(item) for item in session.spec.get("requires", ())}
    if args.item not in known and not requires.confirmable(args.item):
        raise Refused(f"{args.item!r} is not asked for", f"asked for: {', '.join(sorted(known)) or 'nothing'}", 3)
    put_json(session.place.setup, sorted({*get_json(session.place.setup, []), args.item}))
    later = "" if args.item in known else f"; {session.spec['release_id'] or 'what is installed'} does not ask for it"
    say(f"noted: {args.item}{later}")
    return 0


def diff(session: Session, args: argparse.Namespace) -> int:
    """What differs between the released files and the ones in use."""
    found = sync.changes(session.place, session.spec["launch"]["config"], session.spec["drift"])
    lines = [json.dumps(found)] if args.json else [f"{state} {path}" for path, state in sorted(found.items())]
    for line in lines:
        print(line)
    return 0


def doctor(session: Session, args: argparse.Namespace) -> int:
    """Look at everything that can be wrong; exit 1 when something is."""
    spec, place = session.spec, session.place
    missing = requires.unmet(spec.get("requires", ()), session.environment, get_json(place.setup, []))
    checks: list[tuple[str, bool, str]] = [
        ("agent", agent.program(place, spec["plan"]).exists(), str(agent.program(place, spec["plan"]))),
        ("token", bool(session.token), "set" if session.token else f"set REEF_TOKEN or write {place.token}"),
        ("requirements", not missing, ", ".join(requires.label(item) for item in missing) or "met"),
        ("tree", place.tree.is_dir(), str(spec["release_id"])),
    ]
    try:
        head = session.gateway.json("GET", f"/reef/harness?adapter={spec['adapter']}", timeout=5.0)
        checks.append(("gateway", True, f"{session.gateway.url}, head {head.get('release_id')}"))
    except (Refused, ValueError) as error:
        checks.append(("gateway", False, str(error)))
    changed = sync.changes(place, spec["launch"]["config"], spec["drift"])
    checks.append(("your changes", True, ", ".join(sorted(changed)) or "none"))
    checks.append(("runs to report", True, str(spool.pending(place.spool))))
    if args.json:
        print(json.dumps([{"check": name, "ok": ok, "detail": detail} for name, ok, detail in checks]))
    else:
        print("\n".join(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}" for name, ok, detail in checks))
    return 0 if all(ok for _, ok, _ in checks) else 1


def uninstall(session: Session, _: argparse.Namespace) -> int:
    installer.uninstall(session.place, say)
    return 0


COMMANDS: dict[str, Callable[[Session, argparse.Namespace], int]] = {
    "report": report,
    "ask": ask,
    "update": update,
    "setup": setup,
    "diff": diff,
    "doctor": doctor,
    "uninstall": uninstall,
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="reef", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = out.add_subparsers(dest="command", required=True)
    one = commands.add_parser("report")
    one.add_argument("--score", type=float)
    one.add_argument("--feedback")
    one.add_argument("--run")
    one.add_argument("--last", action="store_true")
    commands.add_parser("ask").add_argument("words", nargs="+")
    commands.add_parser("update").add_argument("--release")
    commands.add_parser("setup").add_argument("item")
    for name in ("diff", "doctor"):
        commands.add_parser(name).add_argument("--json", action="store_true")
    commands.add_parser("uninstall")
    return out


def main(argv: Sequence[str]) -> int:
    """`--root FOLDER` (from the wrapper), then a command or the agent's own arguments."""
    environment = dict(os.environ)
    try:
        if len(argv) < 2 or argv[0] != "--root":
            raise Refused("this program is started by its wrapper", code=2)
        session = Session(place_of(argv[1]), environment)
        rest = list(argv[2:])
        if rest and rest[0] in COMMANDS:
            return COMMANDS[rest[0]](session, parser().parse_args(rest))
        return session.run(rest[1:] if rest[:1] == ["--"] else rest)
    except Refused as error:
        say(str(error) + (f"\n  {error.hint}" if error.hint else ""))
        return error.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
