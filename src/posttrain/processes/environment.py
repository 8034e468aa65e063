"""Environment variables of child processes: each kind of child has a list of those it may see, and gets no other.

Code that is not ours (a reward function, an environment, an agent, a server) runs in these processes, so the trainer's keys and
tokens must not be found there. A variable that matches a pattern below but is named like a secret is left out as well; the
user passes it on by its full name (``reward.environment_variables``, ``environment.environment_variables``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from enum import Enum
from fnmatch import fnmatchcase

# To find programs, files and the language; settings of interpreters, the C library, math and drawing libraries; proxies.
_EVERY_CHILD = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("TMPDIR", "TEMP", "TMP", "XDG_*", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_*", "DYLD_*", "MALLOC_*"),
    *("GLIBC_TUNABLES", "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CUDA_*", "NVIDIA_*", "ROCR_*"),
    *("HIP_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "TORCH_*", "PYTORCH_*", "NLTK_DATA", "POSTTRAIN_*"),
    *("JAVA_HOME", "NODE_PATH", "NODE_EXTRA_CA_CERTS", "DISPLAY", "SDL_*", "MUJOCO_*", "PYOPENGL_*"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
)
# A server of a sampler also fetches models, compiles kernels and talks to other ranks.
_SERVER = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_*", "SGLANG_*", "SGL_*", "NCCL_*", "GLOO_*", "UCX_*", "NVSHMEM_*"),
    *("TRITON_*", "TORCHINDUCTOR_*", "FLASHINFER_*", "CUBLAS_*", "CUDNN_*", "RAY_*", "CC", "CXX"),
)
# Ray starts its workers itself, with the environment of its own node; these go there from the driver.
_RAY_WORKER = (
    *(
        "HF_*",
        "HF_TOKEN",
        "TRANSFORMERS_*",
        "TORCH_*",
        "NCCL_*",
        "GLOO_*",
        "TOKENIZERS_*",
        "GOMP_*",
        "OMP_*",
        "MALLOC_*",
    ),
    *("CUBLAS_*",),
)
# Names of further variables, with commas: for every child. A child finds here those that were passed on to it.
PASSED_ON = "POSTTRAIN_PASSED_ON"
_SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH")


class Kind(Enum):
    """Kinds of child processes, by the variables that they may see."""

    USER_CODE = _EVERY_CHILD  # rewards, environments, and agents, which are started by environments
    SERVER = (*_EVERY_CHILD, *_SERVER)
    RAY_WORKER = _RAY_WORKER


def variables_for(kind: Kind, *, named: Iterable[str] = (), withheld: Collection[str] = ()) -> dict[str, str]:
    """The variables of this process that a child of this kind is started with.

    Args: named, further ones that the user's configuration passes on, to this child and to those that it starts itself;
        withheld, names that are left out in any case.
    """
    passed_on = {*named, *filter(None, os.environ.get(PASSED_ON, "").split(","))}
    exact = {*passed_on, *(name for name in kind.value if not name.endswith("*"))}
    patterns = [name for name in kind.value if name.endswith("*")]
    own = {PASSED_ON: ",".join(sorted(passed_on))} if passed_on else {}
    return own | {
        name: value
        for name, value in os.environ.items()
        if name not in withheld
        and (name in exact or (not is_secret(name) and any(fnmatchcase(name, pattern) for pattern in patterns)))
    }


def is_secret(name: str) -> bool:
    """A variable named like a secret: one of its words ends like a key, a token or a password."""
    return any(word.rstrip("S").endswith(_SECRET_ENDINGS) for word in name.upper().split("_"))


def names_in(settings: object) -> list[str]:
    """Variables that an environment's settings name as the place of a key: values under ``..._env``, as in ``token_env``."""
    if isinstance(settings, dict):
        own = [value for key, value in settings.items() if str(key).endswith("_env") and isinstance(value, str)]
        return own + [name for value in settings.values() for name in names_in(value)]
    if isinstance(settings, (list, tuple)):
        return [name for value in settings for name in names_in(value)]
    return []
