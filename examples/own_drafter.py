"""A drafter of one's own, run by the decoding loop itself on the embedded model."""

from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Round, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.text.chat_template import encode_prompt


class BigramDrafter(Drafter):
    """Proposes what followed the last two tokens when they occurred before."""

    name, is_free = "bigram", True

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._follower, self._n_read = dict[tuple[int, ...], int](), 0
        self._read(text)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        chain = list(text[-2:])
        while len(chain) < limit.depth + 2 and (token := self._follower.get(tuple(chain[-2:]))) is not None:
            chain.append(token)
        tree.add_chain(chain[2:], self.name, confidences=[0.5] * len(chain[2:]))
        yield

    def observe(self, done: Round) -> list[Outcome]:
        return self._read(done.text)

    def _read(self, text: Sequence[int]) -> list[Outcome]:
        new = [(tuple(text[i - 2 : i]), text[i]) for i in range(max(2, self._n_read), len(text))]
        self._n_read = len(text)
        outcomes = [Outcome(0.5, self._follower[pair] == token) for pair, token in new if pair in self._follower]
        self._follower.update(new)
        return outcomes


with as_file(files("edgespec") / "assets/python-6m/target.gguf") as path:
    target = open_model("llamacpp", path, LoadOptions(threads=1))
    session, tokenizer = target.open_session(), target.tokenizer
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0), tokenizer.vocab_size), CounterRng(1))
    controller = FixedLength([BigramDrafter()], Budget(depth=4, nodes=4), tokenizer.vocab_size)
    prompt, stop = encode_prompt(tokenizer, "def read_lines(path):\n", parse_special=True), tokenizer.end_of_generation
    events = speculate(session, controller, verifier, prompt, max_tokens=96, stop=stop)
    steps = [event for event in events if isinstance(event, Step)]
    print("|".join(b"".join(map(tokenizer.piece, step.tokens)).decode(errors="replace") for step in steps))
    session.close()
    target.close()
print(f"{sum(step.n_accepted for step in steps)} tokens came from the drafter, in {len(steps) - 1} rounds")
