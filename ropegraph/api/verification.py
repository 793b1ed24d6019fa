"""What verify() found: the error of each output, the scales, the verdict, and all of it as text."""

from __future__ import annotations

from dataclasses import dataclass

from ropegraph.api.contract_check import ScaleCheck

# A right result is off by less than one rounding of its type in the 16-bit types and by a few in
# fp32, where sums over thousands of keys round as well.
TOLERANCE = 32.0


@dataclass(frozen=True)
class OutputCheck:
    """One output of one launch.

    node: the launch.  origin: the node of it that writes the output, where several are merged.
    max_ulp, rms_ulp: the error in units of eps * max(|exact|, rms of exact), where terms cancel of
    the rounding of these; the largest and the root mean square.
    nonfinite: elements that are NaN or Inf where the exact ones are not.
    unchecked: why there is nothing to compare with, else "".
    """

    node: str
    engine: str
    output: str
    max_ulp: float = 0.0
    rms_ulp: float = 0.0
    nonfinite: int = 0
    unchecked: str = ""
    origin: str = ""

    @property
    def is_ok(self) -> bool:
        """True unless it was compared and found wrong."""
        return bool(self.unchecked) or (self.nonfinite == 0 and self.rms_ulp <= TOLERANCE)


@dataclass(frozen=True)
class NodeError:
    """The error of a node over all its outputs, in ulp; a right node has nonfinite 0."""

    max_ulp: float
    rms_ulp: float
    nonfinite: int


@dataclass(frozen=True)
class Verification:
    """What verify() found.

    checks: the outputs, in the order of the launches.  scales: what q_rot, k_rot and stats say of
    the fold.  faults: what kernels noticed of index tensors they read.
    nonfinite_inputs: bound tensors that hold a NaN or Inf before anything runs.
    warnings: tables that do not look like their table_layout; they may still be meant.
    """

    checks: tuple[OutputCheck, ...]
    faults: tuple[str, ...] = ()
    scales: tuple[ScaleCheck, ...] = ()
    nonfinite_inputs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """True if nothing was found wrong; ``unchecked`` tells what was not looked at."""
        return not self.faults and all(c.is_ok for c in (*self.checks, *self.scales))

    def __bool__(self) -> bool:
        return self.is_ok

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What there was nothing to compare with."""
        outputs = (f"{c.node}: {c.output}" for c in self.checks if c.unchecked)
        return (*outputs, *(f"{s.node}: {s.what}" for s in self.scales if s.unchecked))

    @property
    def first_bad(self) -> OutputCheck | None:
        """The first wrong output in the order of the launches: the ones behind it inherit it."""
        return next((c for c in self.checks if not c.is_ok), None)

    @property
    def wrong_scales(self) -> tuple[ScaleCheck, ...]:
        """The folds that the buffers do not bear out."""
        return tuple(s for s in self.scales if not s.is_ok)

    @property
    def nonfinite_origin(self) -> str:
        """Where the first NaN or Inf comes from: an input, the output of a launch, or ""."""
        if self.nonfinite_inputs:
            return f"input {self.nonfinite_inputs[0]!r}"
        made = next((c for c in self.checks if c.nonfinite), None)
        return "" if made is None else f"{made.origin}: {made.output}"

    @property
    def by_node(self) -> dict[str, NodeError]:
        """The error of each node that was compared, the parts of a merged launch by themselves."""
        found: dict[str, list[OutputCheck]] = {}
        for check in self.checks:
            if not check.unchecked:
                found.setdefault(check.origin, []).append(check)
        return {
            node: NodeError(
                max(c.max_ulp for c in own),
                max(c.rms_ulp for c in own),
                sum(c.nonfinite for c in own),
            )
            for node, own in found.items()
        }

    @property
    def verdict(self) -> str:
        """One sentence: the cause before what it leads to."""
        bad = self.first_bad
        if self.wrong_scales:
            # A split names the tensor, a product two of them and stats.
            splits = [s for s in self.wrong_scales if s.what.startswith("split")]
            first = (splits or self.wrong_scales)[0]
            says = "is carried" if splits else "on q.k is what stats tell"
            text = f"WRONG: {first.node}: {first.what}: " + (
                first.fault or f"{first.found:.3g} {says}, the graph wants {first.expected:.3g}"
            )
            text += "; what reads them inherits it"
        elif self.faults:
            text = f"WRONG: {self.faults[0]}"
        elif bad is not None:
            off = f"{bad.nonfinite} NaN or Inf" if bad.nonfinite else f"{bad.rms_ulp:.3g} ulp off"
            text = f"WRONG: {bad.node}: {bad.output}: {off}, {TOLERANCE:g} ulp (rms) are allowed"
        else:
            text = f"right: no output is more than {TOLERANCE:g} ulp (rms) off"
        if self.nonfinite_inputs:
            text += f"; NaN or Inf comes in by {', '.join(map(repr, self.nonfinite_inputs))}"
        return text + (f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else "")

    def __str__(self) -> str:
        wide = max([24, *(len(f"{c.node}: {c.output}") for c in self.checks)])
        lines = [
            self.verdict,
            f"{'launch: output':<{wide}} {'engine':<12} {'max ulp':>9} {'rms ulp':>9}",
        ]
        for c in self.checks:
            figures = c.unchecked or f"{c.max_ulp:9.3g} {c.rms_ulp:9.3g}"
            if c.nonfinite:
                figures += f"  {c.nonfinite} NaN or Inf"
            mark = "" if c.is_ok else "  WRONG"
            lines.append(f"{f'{c.node}: {c.output}':<{wide}} {c.engine:<12} {figures}{mark}")
        lines += [f"scale: {check}" for check in self.scales]
        if self.nonfinite_origin:
            lines.append(f"first NaN or Inf: {self.nonfinite_origin}")
        lines += [f"fault: {text}" for text in self.faults]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])
