"""Text of a sample while its tokens come: whole characters only, and nothing of a stop text."""

import codecs
from collections.abc import Sequence

from gpt_lightning.data.tokenizers import Tokenizer


class TextStream:
    """Text of a sequence that grows token by token.

    The text ends before the stop text that is complete first, however the tokens divide it. A
    character whose bytes are incomplete, and the beginning of a possible stop text, are held back
    until a later token decides them.

    Args:
        tokenizer: Tokenizer of the ids.
        stop: Stop texts, none of them empty.

    Attributes:
        text: Text that no later token changes.
        tokens: Ids up to the end; those of the stop text are included.
        ended: True after a stop text and after `close`; further tokens are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.text, self.ended = "", False
        self.tokens: list[int] = []
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, token: int) -> None:
        """Append the text of one more token."""
        if not self.ended:
            self.tokens.append(token)
            self._append(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def close(self) -> None:
        """End the text: half a character becomes U+FFFD, and what is held back is released."""
        if not self.ended:
            self._append(self._decoder.decode(b"", final=True))
            if not self.ended:
                self.text, self.ended = self.text + self._held, True

    def _append(self, new: str) -> None:
        held = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.ended, certain = True, min(found)[1]
        else:  # up to the first place at which a stop text may have begun
            starts = (
                i for i in range(len(held)) if any(s.startswith(held[i:]) for s in self._stop)
            )
            certain = next(starts, len(held))
        self.text, self._held = self.text + held[:certain], held[certain:]
