"""A drafter of one's own, run by the decoding loop itself on the embedded model."""

from collections.abc import Sequence
from importlib.resources import as_file, files

from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.controller.fixed import FixedLength
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Draft, Step, Verdict
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.core.verify import SampleMatching
from edgespec.text.chat_template import encode_prompt


class BigramDrafter:
    """Proposes what followed the last two tokens when they occurred before."""

    name = "bigram"

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._follower: dict[tuple[int, ...], int] = {}
        self._n_read = 2

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        for i in range(self._n_read, len(tokens)):
            self._follower[tuple(tokens[i - 2 : i])] = tokens[i]
        self._n_read = max(2, len(tokens))
        chain = list(tokens[-2:])
        while len(chain) < budget.depth + 2 and (token := self._follower.get(tuple(chain[-2:]))) is not None:
            chain.append(token)
        return Draft.chain(chain[2:])

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        """A drafter that learns would look at what was accepted."""


with as_file(files("edgespec") / "assets/python-6m/target.gguf") as path:
    target = open_model("llamacpp", path, LoadOptions(threads=1), progress=lambda _: None, check=lambda: None)
    session = target.open_session(lambda: None)
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0), target.tokenizer.vocab_size), CounterRng(1))
    prompt = encode_prompt(target.tokenizer, "def read_lines(path):\n", parse_special=True)
    controller, stop = FixedLength(BigramDrafter(), Budget(depth=4, nodes=4)), target.tokenizer.end_of_generation
    steps: list[Step] = []
    for event in speculate(session, controller, verifier, prompt, max_tokens=96, stop=stop):
        if isinstance(event, Step):
            steps.append(event)
            print(b"".join(target.tokenizer.piece(token) for token in event.tokens).decode(errors="replace"), end="|")
    session.close()
    target.close()
tau = sum(len(step.tokens) for step in steps[1:]) / len(steps[1:])  # tokens per forward of the target
print(f"\n{sum(step.n_accepted for step in steps)} tokens came from the drafter, tau {tau:.2f}")
