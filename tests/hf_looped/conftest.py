"""Tiny models whose every weight matters: gains, scalars and the LM head are moved away from their initial values."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.modeling_looped import position_noise


@pytest.fixture(scope="session")
def tiny_config():
    """Config of 1 + 2·3 + 1 executed layers, two heads of 16 channels, 64 tokens; any field can be replaced."""

    def build(**fields):
        defaults = {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_prelude_layers": 1,
            "num_recurrent_layers": 2,
            "num_coda_layers": 1,
            "num_recurrences": 3,
            "max_position_embeddings": 64,
        }
        return LoopedConfig(**(defaults | fields))

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
    """Model in eval mode with seeded weights; gains, the injection and the LM head are perturbed.

    The initial LM head has a standard deviation of 0.001, which would hide errors behind any absolute tolerance.
    """

    def build(attention="sdpa", seed=0, **fields):
        config = tiny_config(**fields)
        config._attn_implementation = attention
        torch.manual_seed(seed)
        model = LoopedForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(
                    part in name for part in ("norm", "injection", "adapter", "time", "exit_gate")
                ):
                    parameter += 0.2 * torch.randn_like(parameter)
            if not config.tie_word_embeddings:
                model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight) / 2)
        return model.eval()

    return build


@pytest.fixture
def tokens():
    """Random token ids [rows, length] below 64."""

    def draw(rows=2, length=12, seed=0):
        return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))

    return draw


class InertStream:
    """Stand-in for a CUDA stream: Transformers' offloading code runs on a CPU, where nothing is concurrent."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.fixture
def inert_streams(monkeypatch):
    monkeypatch.setattr(torch, "Stream", InertStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: InertStream())


class NaiveLoop:
    """A looped model for one row in NumPy and float64, which shares no code with the model.

    `keys` and `values` hold for each slot a list with [G, C] for every cached token.
    """

    def __init__(self, model):
        self.config = model.config
        self.weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
        self.keys, self.values = defaultdict(list), defaultdict(list)
        self.last = {}
        self.seen = 0

    def call_adaptively(self, ids, r, stops):
        """Logits [T, V] and recurrences used [T], token by token: each ends where stops(new, old state, t) says."""
        logits, used = [], []
        for token in ids:
            logits.append(self.call([token], r, stops)[0])
            used.append(self.used)
        return np.stack(logits), used

    def call(self, ids, r, stops=lambda new, old, t: False):
        """Logits [T, V] of one call with up to r recurrences on the new tokens [T]."""
        config, weights = self.config, self.weights
        m = r if config.num_cached_recurrences is None else min(config.num_cached_recurrences, r)
        outer = config.num_prelude_layers + config.num_coda_layers
        x = self.norm("model.embed_norm", weights["model.embed_tokens.weight"][ids])
        for i in range(config.num_prelude_layers):
            x = self.block(f"model.prelude.{i}", x, slot=i)
        carried = self.start(x)
        self.used = r
        for t in range(r):
            u, old = self.read(carried, x, t), sum(carried)
            for i in range(config.num_recurrent_layers):
                slot = outer + t % m * config.num_recurrent_layers + i
                u = self.block(f"model.recurrent.{i}", u, slot, keep=t >= r - m, time=(t, r))
            carried = self.write(carried, self.norm("model.recurrent_norm", u), t)
            if t < r - 1 and stops(sum(carried), old, t):
                self.used = t + 1
                self.fill(range(t + 1, r), r, m)
                break
        h = sum(carried)
        for i in range(config.num_coda_layers):
            h = self.block(f"model.coda.{i}", h, slot=config.num_prelude_layers + i)
        self.seen += len(ids)
        raw = self.norm("model.norm", h) @ weights["lm_head.weight"].T
        return 15 * np.tanh(raw / 15)

    def fill(self, skipped, r, m):
        """Leave the last keys and values of each recurrent layer in the slots of the recurrences that are skipped."""
        outer = self.config.num_prelude_layers + self.config.num_coda_layers
        for t in skipped:
            for i in range(self.config.num_recurrent_layers):
                if t >= r - m:
                    slot = outer + t % m * self.config.num_recurrent_layers + i
                    key, value = self.last[f"model.recurrent.{i}"]
                    self.keys[slot] = [*self.keys[slot], key]
                    self.values[slot] = [*self.values[slot], value]

    def start(self, e):
        """Lanes of the state, one of them without hyperconnections."""
        if self.config.initial_state == "zeros":
            return [np.zeros_like(e)]
        if self.config.initial_state == "normal":
            positions = self.seen + torch.arange(len(e))[None]
            noise = position_noise(positions, e.shape[1], self.config.state_seed)
            return [noise[0].double().numpy()]
        lanes = self.config.num_lanes if self.config.injection == "hyperconnections" else 1
        return [e] * lanes

    def read(self, lanes, e, t):
        if self.config.injection == "linear":
            matrix = self.weights["model.injection.proj.weight"]
            return np.concatenate((e, lanes[0]), axis=1) @ matrix.T
        if self.config.injection == "hyperconnections":
            alpha = self.weights["model.injection.alpha"][t]
            return sum(a * lane for a, lane in zip(alpha, lanes, strict=True))
        if self.config.injection == "diagonal":
            rate, step, gain = (
                self.weights[f"model.injection.{name}"] for name in ("log_rate", "step", "gain")
            )
            return np.exp(-np.log1p(np.exp(step)) * np.exp(rate)) * lanes[0] + gain * e
        return lanes[0] + e if self.config.injection == "additive" else lanes[0]

    def write(self, lanes, output, t):
        if self.config.injection != "hyperconnections":
            return [output]
        mixing = self.weights["model.injection.mixing"][t]
        beta = self.weights["model.injection.beta"][t]
        count = range(len(lanes))
        return [sum(mixing[j, k] * lanes[k] for k in count) + beta[j] * output for j in count]

    def norm(self, name, x):
        return self.rms(x) * self.weights[f"{name}.weight"]

    def rms(self, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)

    def turn(self, x, position):
        """Rotate [heads, C] as complex numbers, whose imaginary parts are the second half of the channels."""
        half = x.shape[1] // 2
        angles = position * 10000.0 ** (-np.arange(half) / half)
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return self.rms(np.concatenate((z.real, z.imag), axis=1))

    def matrix(self, name, t):
        """Weight of a projection, with the adapters of recurrence t where it has some."""
        weight = self.weights[f"{name}.weight"]
        if f"{name}.adapter_up" in self.weights:
            up, down = (self.weights[f"{name}.adapter_{way}"][t] for way in ("up", "down"))
            weight = weight + up @ down / len(down)
        return weight

    def modulation(self, name, t, r):
        """Factors on the inputs and outputs of attention and MLP, [4, D]."""
        if not self.config.time_conditioning or "recurrent" not in name:
            return np.ones((4, 1))
        features = []
        for x in (t / r, 1 / r):
            for angle in (np.pi * x, 2 * np.pi * x):
                features += [np.cos(angle), np.sin(angle)]
        weight = self.weights[f"model.time_modulation.{name.split('.')[-1]}.weight"]
        return 1 + (weight @ np.array(features)).reshape(4, -1)

    def block(self, name, x, slot, keep=True, time=(0, 1)):
        """A block on [T, D]: each token sees the slot's past and the tokens of this call up to itself."""
        config = self.config
        factors = self.modulation(name, *time)
        y = self.norm(f"{name}.input_layernorm", x) * factors[0]
        query, key, value = (
            (y @ self.matrix(f"{name}.self_attn.{p}_proj", time[0]).T).reshape(
                len(x), -1, config.head_dim
            )
            for p in "qkv"
        )
        keys, values = list(self.keys[slot]), list(self.values[slot])
        group = config.num_attention_heads // config.num_key_value_heads
        attended = []
        for i in range(len(x)):
            keys.append(self.turn(key[i], self.seen + i))
            values.append(value[i])
            heads = []
            for head, q in enumerate(self.turn(query[i], self.seen + i)):
                scores = np.array([k[head // group] @ q for k in keys]) / config.head_dim**0.5
                shares = np.exp(scores - scores.max())
                past = np.stack([v[head // group] for v in values])
                heads.append(shares @ past / shares.sum())
            attended.append(np.concatenate(heads))
        self.last[name] = keys[-1], values[-1]
        if keep:
            self.keys[slot], self.values[slot] = keys, values
        out = np.stack(attended) @ self.matrix(f"{name}.self_attn.o_proj", time[0]).T
        x = x + out * factors[1]
        y = self.norm(f"{name}.post_attention_layernorm", x) * factors[2]
        hidden = np.maximum(y @ self.matrix(f"{name}.mlp.up_proj", time[0]).T, 0) ** 2
        return x + hidden @ self.matrix(f"{name}.mlp.down_proj", time[0]).T * factors[3]


def naive_logits(model, rows, lengths, r=None):
    """Logits [B, T, V] of rows fed in calls of these lengths, and each row's loop with its cache."""
    loops, logits = [NaiveLoop(model) for _ in rows], []
    for loop, row in zip(loops, rows.tolist(), strict=True):
        ends = np.cumsum(lengths)
        parts = [row[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        r_of_call = model.config.num_recurrences if r is None else r
        logits.append(np.concatenate([loop.call(part, r_of_call) for part in parts]))
    return torch.tensor(np.stack(logits), dtype=torch.float), loops


def naive_greedy(model, calls, steps, r):
    """Greedy tokens and their logits [steps, V] after a prompt that is fed in the given calls, lists of tokens."""
    loop, tokens, logits = NaiveLoop(model), [], []
    for call in calls:
        last = loop.call(call, r)[-1]
    for _ in range(steps):
        logits.append(last)
        tokens.append(int(last.argmax()))
        last = loop.call(tokens[-1:], r)[-1]
    return tokens, torch.tensor(np.stack(logits), dtype=torch.float)


@pytest.fixture(scope="session")
def naive():
    """The referee of the model: a naive loop over tokens, keys and values (`Loop`), its logits and greedy tokens."""
    return SimpleNamespace(Loop=NaiveLoop, logits=naive_logits, greedy=naive_greedy)
