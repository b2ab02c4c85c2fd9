"""Exceptions that half precision itself raises: an operator without it, a constant beyond its range."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfstep.checks.quoting import quoted
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import AutocastEntered, Event, Finding, Raised

_CONSTANT = re.compile(r"value cannot be converted to type (?:c10::|at::)?(Half|BFloat16) without overflow")
_UNSAFE = re.compile(r"(\S+) (?:and \S+ )?are unsafe to autocast")
_KERNEL = re.compile(r"\"(\S+?)\" not implemented for '(Half|BFloat16|ComplexHalf)'")
_OTHERS = (
    re.compile(r"(?P<op>[\w.]+): Low precision dtypes not supported\. Got (?P<dtype>Half|BFloat16)"),
    re.compile(r"Unsupported dtype (?P<dtype>Half|BFloat16)"),
    re.compile(r"(?P<op>\w+ FFT) doesn't support tensors of type: (?P<dtype>Half|BFloat16)"),
    re.compile(r"(?P<op>cuFFT) only supports .*half precision"),
    re.compile(r"(?P<op>\w+) only supports floating-point dtypes.*(?P<dtype>Half|BFloat16)"),
    re.compile(r"(?P<op>\w+)\(\) input tensor must be either float or double dtype"),
    re.compile(r"Expected both inputs to be Half, Float or Double tensors but got (?P<dtype>BFloat16)"),
    re.compile(r"(?P<op>\w+) is only supported for half, float and double tensors, but got .*(?P<dtype>BFloat16)"),
    re.compile(r"This function doesn't handle types other than float and double"),
    re.compile(r"(?P<op>\w+).* (?:does not|doesn't) support (?:dtype )?(?:torch\.)?(?P<dtype>B?[Ff]loat16|Half)"),
    re.compile(r"Got unsupported ScalarType (?P<dtype>BFloat16)"),
    re.compile(r"(?P<op>Index put) requires the source and destination dtypes match, got .*(?P<dtype>Half|BFloat16)"),
    re.compile(r"(?P<op>\w+)\(\): self \(.*\) and source \(.*\) must have the same scalar type"),
    re.compile(r"(?P<op>scatter)\(\): Expected self\.dtype to be equal to src\.dtype"),
)
_PRIMITIVE = re.compile(r"could not create a primitive descriptor for the (.+?) primitive")
_NAMES = {"Half": "float16", "BFloat16": "bfloat16", "ComplexHalf": "complex32"}


class Unsupported(BaseCheck):
    rules = ("half-unsupported-operator", "half-constant-overflow", "saturated-half-probabilities")

    def __init__(self) -> None:
        self._half: str | None = None  # what computations were last cast to

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, AutocastEntered):
            self._half = event.dtype if event.enabled and event.dtype in ("float16", "bfloat16") else None
        if not isinstance(event, Raised):
            return
        constant = _CONSTANT.search(event.message)
        if constant is not None:
            yield _constant(event, _NAMES[constant.group(1)])
            return
        unsafe = _UNSAFE.search(event.message)
        if unsafe is not None:
            yield _unsafe(event, unsafe.group(1))
            return
        kernel = _KERNEL.search(event.message)
        if kernel is not None:
            if "foreach_non_finite" not in kernel.group(1):  # the scaler's: half-parameters-with-scaler
                yield _unsupported(event, kernel.group(1), kernel.group(2))
            return
        primitive = _PRIMITIVE.search(event.message)
        if primitive is not None and self._half is not None:
            yield _unsupported(event, primitive.group(1), self._half)
            return
        for pattern in _OTHERS:
            found = pattern.search(event.message)
            if found is not None:
                named = found.groupdict()
                yield _unsupported(event, named.get("op"), named.get("dtype"))
                return


def _constant(event: Raised, dtype: str) -> Finding:
    largest = 65504.0 if dtype == "float16" else 3.3895e38
    return Finding(
        rule="half-constant-overflow",
        severity="error",
        at=event.at,
        message=f"a constant does not fit {dtype}, whose largest number is {largest:g} (torch: {quoted(event)})",
        evidence={"exception": event.type, "dtype": dtype, "limit": largest},
        fix="take the constant from the dtype: torch.finfo(x.dtype).min, or float('-inf')",
        phase="forward",
    )


def _unsafe(event: Raised, operator: str) -> Finding:
    name = operator.rsplit(".", 1)[-1]
    return Finding(
        rule="saturated-half-probabilities",
        severity="error",
        at=event.at,
        message=f"{name} on probabilities under autocast: in half precision they round to 0 and 1 ({quoted(event)})",
        evidence={"exception": event.type},
        fix="compute the loss on the logits: binary_cross_entropy_with_logits",
        operator=name,
        phase="forward",
    )


def _unsupported(event: Raised, operator: str | None, dtype: str | None) -> Finding:
    half = _NAMES.get(dtype or "", dtype or "half precision")
    return Finding(
        rule="half-unsupported-operator",
        severity="error",
        at=event.at,
        message=f"{operator or 'an operator'} has no {half} form, and half precision reached it ({quoted(event)})",
        evidence={"exception": event.type, "dtype": half},
        fix="cast its input to float32 at this line: x.float()",
        operator=operator,
    )
