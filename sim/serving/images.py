"""Images in prompts: when they are encoded, and how many wait, encoded, to be read.

As vLLM does it: one is encoded in the step that computes its first token (images of a prompt lie before its text). A
step encodes images of ``room`` tokens at most, and as many may be kept until the language model has read them; a prompt
is cut before an image that has no room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import workloads
from sim.errors import ScenarioError
from sim.serving.inflight import Sequence
from sim.serving.requests import Request


@dataclass(kw_only=True, slots=True, eq=False)
class ImageRoom:
    """Room for encoded images of a replica, in tokens; ``left`` of what the step at hand may encode.

    >>> request = Request(number=0, arrival_s=0.0, input_tokens=700, output_tokens=1, images=3, image_tokens=200)
    >>> sequence, room = Sequence(request=request, target=700), ImageRoom(room=500)
    >>> room.begin()
    >>> tokens = room.cut(sequence, 0, 700)
    >>> room.take(sequence, tokens)
    >>> tokens, room.fresh, room.held
    (400, {0: 2}, 400)
    """

    room: int
    left: int = 0
    held: int = 0
    fresh: dict[int, int] = field(default_factory=dict)  # images encoded in the step at hand, by request

    def begin(self) -> None:
        """The next step is planned."""
        self.left = self.room
        self.fresh = {}

    def cut(self, sequence: Sequence, reached: int, tokens: int) -> int:
        """How many of its next ``tokens`` from ``reached`` on come before an image without room."""
        request = sequence.request
        fits = min(self.left, self.room - self.held) // request.image_tokens if request.images else 0
        beyond = sequence.encoded + fits  # the first image that finds none
        return min(tokens, beyond * request.image_tokens - reached) if beyond < request.images else tokens

    def take(self, sequence: Sequence, reached: int) -> None:
        """Encode what begins before the token ``reached``."""
        request = sequence.request
        if not request.images:
            return
        begun = min(request.images, -(-reached // request.image_tokens))
        fresh = max(0, begun - sequence.encoded)
        sequence.encoded += fresh
        self.left -= fresh * request.image_tokens
        self.held += fresh * request.image_tokens
        self.fresh[request.number] = fresh

    def read(self, sequence: Sequence) -> None:
        """Images whose last token is computed are let go."""
        request = sequence.request
        if sequence.images_read < sequence.encoded:
            whole = min(sequence.encoded, sequence.computed // request.image_tokens)
            self.held -= (whole - sequence.images_read) * request.image_tokens
            sequence.images_read = whole

    def forget(self, sequence: Sequence) -> None:
        """It begins anew."""
        self.held -= (sequence.encoded - sequence.images_read) * sequence.request.image_tokens
        sequence.encoded = sequence.images_read = 0


def with_image_tokens(requests: Iterable[Request], model_id: str) -> list[Request]:
    """``requests`` with what their images are to the model: patches for its encoder, and tokens of the prompt."""
    found = list(requests)
    first = next((one for one in found if one.images), None)
    if first is None:
        return found
    vision = workloads.load_model(model_id).vision
    if vision is None:
        raise ScenarioError(
            f"images = {first.images}: {model_id} has no image encoder that is simulated: leave "
            "images out, or give a model with one, as llava-1.5-7b"
        )
    if any(one.images and one.prefix for one in found):
        raise ScenarioError(
            "images: not known beside hash_ids, which do not say where in a prompt they are: leave one of them out"
        )
    made = []
    for one in found:
        patches, tokens = vision.of_image(one.image_size)
        made.append(
            replace(
                one, input_tokens=one.input_tokens + one.images * tokens, image_tokens=tokens, image_patches=patches
            )
            if one.images
            else one
        )
    return made


def room_for(requests: Iterable[Request], budget: int) -> ImageRoom | None:
    """Of a replica whose steps compute ``budget`` tokens, or one image that has more; None: there are no images."""
    largest = max((one.image_tokens for one in requests if one.images), default=0)
    return ImageRoom(room=max(budget, largest)) if largest else None
