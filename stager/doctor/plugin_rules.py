"""What of the plugin's lines in plugstack.conf is wrong on one node, or of the scripts without it?

Pure; see `node_rules`.
"""

from __future__ import annotations

import difflib
import stat
from typing import TYPE_CHECKING

from stager.doctor.finding import closed_problem, note, ok, problem, seen_or_problem, unknown
from stager.node.facts import ABSENT, PLUGIN, is_mistyped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.doctor.finding import Examined, Finding
    from stager.node.facts import AbsentPlugin, NodeFacts, PluginLine

_INSTALL = "install plugin and package together (packaging/install)"
#: Part of the name of each file that our plugin takes for pyxis (prolog/spank/order.c).
_PYXIS = "pyxis"
#: The arguments of the plugin, and what users must be able to do with the file.
_KEYS = {"python": "run", "config": "read"}


def plugins(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """plugstack.conf names the plugin once, as installed with this package."""
    path = examined.site.slurm.get("PlugStackConfig", "")
    if not path:
        yield unknown("plugin", "Slurm does not say where plugstack.conf is")
        return
    for file, closed in node.closed.items():
        follows = ": Slurm's commands fail for them, or know no --stage"
        yield closed_problem("plugin", f"users cannot read {file}", file, closed, follows)
    if not node.plugins and node.scripts:
        yield from _scripts(node, examined)
    elif len(node.plugins) > 1:
        files = ", ".join(dict.fromkeys(line.file for line in node.plugins))
        text = f"spank_stage.so is named {len(node.plugins)} times in {files}"
        yield problem("plugin", text, "remove all these lines but one")
    elif not (node.plugins or node.ignored_lines or node.closed or _is_named_otherwise(node, path)):
        remedy = (
            f"write one line, there or in a file that it includes: required /PATH/{PLUGIN} "
            f"python={node.prefix}/bin/python3 config={node.config} (without it, TaskProlog must "
            "stage)"
        )
        yield problem("plugin", f"spank_stage.so is not named in {path}", remedy)
    for ignored in node.ignored_lines:
        text = f"Slurm ignores this line of {ignored}"
        yield problem("plugin", text, "begin it with required or optional")
    for absent in node.absent_plugins:
        text = f"{absent.plugin} in {absent.file} is not there, so {_follows(absent)}"
        yield problem("plugin", text, "correct the path, or install the plugin there")
    for line in node.plugins:
        yield from _plugin(line, node, examined)


def _is_named_otherwise(node: NodeFacts, path: str) -> bool:
    """Whether plugstack.conf, at ``path``, names the plugin wrongly, or may name it unseen."""
    mistyped = any(is_mistyped(absent.plugin) for absent in node.absent_plugins)
    return mistyped or path in node.closed


def _follows(line: AbsentPlugin | PluginLine) -> str:
    """Return what Slurm does on a machine where it cannot load the plugin."""
    if line.required:
        return "srun, sbatch and salloc fail for everybody, slurmd does not start, and nodes drain"
    return "--stage is an unknown option, and jobs start without their files"


def _is_told(line: PluginLine, node: NodeFacts) -> bool:
    """Whether it was said that the plugin's file is missing, or closed to users."""
    absent = any(one.plugin == line.plugin for one in node.absent_plugins)
    return absent or line.plugin in node.closed


def _plugin(line: PluginLine, node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    version = line.version or "unknown"
    slurm = examined.site.slurm.get("SLURM_VERSION", "")
    if not line.plugin.startswith("/"):
        text = f"{line.plugin} in {line.file} has no path, so its version is not known"
        yield unknown("plugin", text, "write its whole path")
    elif not line.version and _is_told(line, node):
        pass
    elif line.version != node.package:
        text = f"{line.plugin} has version {version}, this package {node.package}"
        yield problem("plugin", text, _INSTALL)
    elif any(one.key == "python" and one.place.owner == ABSENT for one in line.arguments):
        pass  # which is said below
    elif not line.python.startswith(f"{node.prefix}/"):
        text = f"python={line.python} in {line.file} is not of {node.prefix}"
        yield problem("plugin", text, _INSTALL)
    elif line.slurm and slurm and not slurm.startswith(f"{line.slurm}."):
        text = f"{line.plugin} is built for Slurm {line.slurm}, and this is {slurm}, so "
        remedy = "build it with this Slurm's headers (packaging/install)"
        yield problem("plugin", text + _follows(line), remedy)
    else:
        yield ok("plugin", f"{line.plugin} has version {version}, as this package")
    yield from _arguments(line, node)
    for before in (plugin for plugin in line.after if _PYXIS in plugin):
        text = f"{before} is before spank_stage.so in {line.file}, so containers are started before"
        yield problem("plugin", f"{text} their images are staged", "list spank_stage.so first")


def _arguments(line: PluginLine, node: NodeFacts) -> Iterator[Finding]:
    """The Python and the stage.toml that the line names are there, and users can use them."""
    follows = "srun, sbatch and salloc fail for everybody"
    if not line.required:
        follows = "nothing can be staged, and --stage is an unknown option"
    for word in line.unknown:
        near = difflib.get_close_matches(word.partition("=")[0], _KEYS, n=1)
        remedy = f"write {near[0]}=/PATH" if near else "write python=/PATH and config=/PATH"
        text = f"argument {word} in {line.file} is not valid, so {follows}"
        yield problem("plugin", text, remedy)
    for one in line.arguments:
        path = one.place.path
        where = f"in {line.file}" if one.given else "(the default)"
        name = f"{one.key}={path} {where}"
        if one.closed:
            text = f"{name}: users cannot {_KEYS[one.key]} it, as {one.closed} is closed to them"
            bits = "+r" if one.closed == path and one.key == "config" else "+x"
            yield problem("plugin", text, f"chmod o{bits} {one.closed}, or name another file")
        elif one.place.owner < 0 and (one.given or not line.unknown):
            remedy = "put it there, or correct the line"
            yield seen_or_problem("plugin", one.place, f"{name} is not there", remedy)
        elif one.key == "config" and one.digest and node.digest not in ("", one.digest):
            text = f"{name} is not the stage.toml that stagectl reads ({node.config})"
            yield problem("plugin", text, f"make {node.config} a link to it")


def _script_folder(node: NodeFacts) -> str:
    """Return where slurm.conf finds the scripts: not in a prefix, which may go before its line."""
    of_package = node.prefix.startswith("/usr/")
    return f"{node.prefix}/libexec" if of_package else "/etc/slurm/slurm-stage"


def _scripts(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Without the plugin, Slurm runs this package's scripts, or the site's own that call them."""
    config = examined.site.slurm
    bad = 0
    for key, name in (
        ("TaskProlog", "task_prolog"), ("Prolog", "job_prolog"), ("Epilog", "job_epilog"),
    ):  # fmt: skip
        if config.get(key, config.get(f"{key}[0]", "(null)")) in ("(null)", ""):
            bad += 1
            text = f"{key} is not set, which a site without the plugin needs"
            yield problem("scripts", text, f"{key}={_script_folder(node)}/{name} in slurm.conf")
    for script in node.scripts:
        remedy = "put the script there, or correct slurm.conf"
        if script.owner == ABSENT and not node.computes:
            bad += 1
            text = f"{script.path} is not on this machine; on a compute node without it, jobs fail "
            text += "or the node is drained"
            yield note("scripts", text, "see that all of these have it before a job runs there")
        elif script.owner < 0:
            bad += 1
            yield seen_or_problem("scripts", script, f"{script.path} is not there", remedy)
        elif not script.mode & stat.S_IXOTH:
            bad += 1
            text = f"{script.path} cannot be executed"
            yield problem("scripts", text, f"chmod 755 {script.path}")
    if not bad:
        yield ok("scripts", "without the plugin, TaskProlog, Prolog and Epilog stage and clean up")
