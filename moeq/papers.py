"""The papers that moeq implements, the works that it compares with, and the words of the field that pages explain.

Numbers are moeq's own names of the five papers: of files in recipes/, of sheets and presets ("paper-000").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ARXIV = "https://arxiv.org/abs/"


@dataclass(frozen=True, kw_only=True)
class Paper:
    """number: moeq's name of it, three digits; none of works that moeq only compares with. short: as texts name it."""

    number: str = ""
    short: str
    title: str
    authors: str
    year: int
    link: str


CONTEXT_AWARE = Paper(
    number="000",
    short="Fan et al. 2025",
    title="Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems",
    authors="Zehao Fan, Zhenyu Liu, Yunzhen Liu, Yayue Hou, Hadjer Benmeziane, Kaoutar El Maghraoui, Liu Liu",
    year=2025,
    link=f"{ARXIV}2512.04476",
)
DYNAEXQ = Paper(
    number="001",
    short="DynaExq",
    title="Dynamic Expert Quantization for Scalable Mixture-of-Experts Inference",
    authors="Kexin Chu, Dawei Xiang, Zixu Shen, Yiwei Yang, Zecheng Liu, Wei Zhang",
    year=2025,
    link=f"{ARXIV}2511.15015",
)
ELEPHANTS = Paper(
    number="002",
    short="Kim et al. 2022",
    title="Who Says Elephants Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production",
    authors="Young Jin Kim, Rawn Henry, Raffy Fahim, Hany Hassan Awadalla",
    year=2022,
    link=f"{ARXIV}2211.10017",
)
MOPEQ = Paper(
    number="003",
    short="MoPEQ",
    title="MoPEQ: Mixture of Mixed Precision Quantized Experts",
    authors="Krishna Teja Chitty-Venkata, Jie Ye, Murali Emani",
    year=2025,
    link=f"{ARXIV}2509.02512",
)
COQMOE = Paper(
    number="004",
    short="CoQMoE",
    title="CoQMoE: Co-Designed Quantization and Computation Orchestration for Mixture-of-Experts Vision Transformer on "
    "FPGA",
    authors="Jiale Dong, Hao Wu, Zihao Wang, Wenqi Lou, Zhendong Zheng, Lei Gong, Chao Wang, Xuehai Zhou",
    year=2025,
    link=f"{ARXIV}2506.08496",
)
PAPERS = {paper.number: paper for paper in (CONTEXT_AWARE, DYNAEXQ, ELEPHANTS, MOPEQ, COQMOE)}

MONDE = Paper(
    short="Kim et al. 2024",
    title="MoNDE: Mixture of Near-Data Experts for Large-Scale Sparse Models",
    authors="Taehyun Kim, Kwanseok Choi, Youngmock Cho, Jaehoon Cho, Hyuk-Jae Lee, Jaewoong Sim",
    year=2024,
    link=f"{ARXIV}2405.18832",
)
HOBBIT = Paper(
    short="Tang et al. 2024",
    title="HOBBIT: A Mixed Precision Expert Offloading System for Fast MoE Inference",
    authors="Peng Tang, Jiacheng Liu, Xiaofeng Hou, Yifei Pu, Jing Wang, Pheng-Ann Heng, Chao Li, Minyi Guo",
    year=2024,
    link=f"{ARXIV}2411.01433",
)
GPTQ = Paper(
    short="Frantar et al. 2022",
    title="GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    authors="Elias Frantar, Saleh Ashkboos, Torsten Hoefer, Dan Alistarh",
    year=2022,
    link=f"{ARXIV}2210.17323",
)
SIGNROUND = Paper(
    short="Cheng et al. 2023",
    title="Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs",
    authors="Wenhua Cheng, Weiwei Zhang, Haihao Shen, Yiyang Cai, Xin He, Kaokao Lv, Yi Liu",
    year=2023,
    link=f"{ARXIV}2309.05516",
)


@dataclass(frozen=True, kw_only=True)
class Term:
    """A word that pages explain; pattern: how texts write it, beside its name; paper: where it comes from."""

    name: str
    meaning: str
    pattern: str = ""
    paper: Paper | None = None

    def stands_in(self, text: str) -> bool:
        """Whether a text has the word."""
        return re.search(rf"(?<![\w-])(?:{self.pattern or re.escape(self.name)})(?![\w-])", text) is not None


TERMS = (
    Term(
        name="KL",
        meaning="Kullback-Leibler divergence: how far the distribution of the next token is from the original model's, "
        "in nats a token; 0 is no difference.",
        pattern="KL|Kullback-Leibler",
    ),
    Term(name="top-1", meaning="the token, or class, that the model holds for the likeliest."),
    Term(
        name="code bits",
        meaning="the bits of a weight's integer code alone, as papers count them; what is stored for a weight is more, "
        "since every group of weights has a scale and perhaps a zero point.",
    ),
    Term(name="RTN", meaning="every weight rounded to the nearest code of its group's grid; no calibration."),
    Term(
        name="GPTQ",
        meaning="weights are rounded one input after the other, and the error of each is made up for by those that "
        "follow, as calibration's Hessian says.",
        paper=GPTQ,
    ),
    Term(
        name="SignRound",
        meaning="the direction in which each weight is rounded, and the ends of its grid, trained by signed gradients "
        "on calibration text.",
        paper=SIGNROUND,
    ),
    Term(
        name="prefix-split",
        meaning="experts in order of importance, cut into runs of 4, 3, 2 and 1 code bits with the largest gain.",
        pattern="prefix-split|PREFIXSPLIT",
        paper=CONTEXT_AWARE,
    ),
    Term(
        name="NDP",
        meaning="near-data processing: arithmetic units beside a large memory that compute there what would otherwise "
        "be copied to the GPU.",
        pattern="NDP|near-data(?: memory| side)?",
    ),
    Term(
        name="CXL",
        meaning="Compute Express Link: a link, over PCIe's wires, by which a GPU reaches memory outside of its own.",
    ),
    Term(
        name="context-aware",
        meaning="the placement that the estimate is about: the experts that a sequence's own prefill chose most lie on "
        "the GPU for its decode, all others compute near the data.",
        paper=CONTEXT_AWARE,
    ),
    Term(
        name="MoNDE",
        meaning="a GPU beside a near-data processor that holds all experts in FP16; in every step some are copied to "
        "the GPU, the others compute near the data.",
        paper=MONDE,
    ),
    Term(
        name="bandwidth rule",
        meaning="MoNDE's own choice of how many of a step's experts are copied to the GPU: the share that the link "
        "has of both bandwidths, its own and the near-data memory's, one at least.",
        paper=MONDE,
    ),
    Term(
        name="cost-optimal",
        meaning="MoNDE with as many experts copied as make the step shortest: the hardest of these baselines, and "
        "moeq's own addition.",
    ),
    Term(
        name="HOBBIT",
        meaning="a GPU alone: experts that are missing are copied when they are needed, in high precision, in low "
        "precision or not at all by how much they matter.",
        paper=HOBBIT,
    ),
    Term(
        name="DynaExq",
        meaning="all experts on the GPU in one of two precisions, which follow a moving average of how often each was "
        "chosen.",
        paper=DYNAEXQ,
    ),
    Term(
        name="GPU only", meaning="experts lie in host memory and are copied to the GPU when they are needed, in FP16."
    ),
    Term(name="hot set", meaning="MoNDE with the experts that are the most popular overall copied, in every step."),
    Term(name="static mixed precision", meaning="all experts on the GPU in the widths that were assigned."),
    Term(
        name="static placement",
        meaning="the same experts on the GPU for every sequence, all others near the data.",
    ),
    Term(
        name="Hessian trace",
        meaning="the sum of a loss's second derivatives by all weights: how fast it grows when they move.",
        paper=MOPEQ,
    ),
    Term(
        name="dominated",
        meaning="another variant is no larger and no worse, and better in one of both.",
    ),
)

_NUMBERED = re.compile(r"\b([Pp])aper (00[0-4])\b")


def named(text: str) -> str:
    """A text that calls papers by moeq's numbers, with their names: "Fan et al. 2025 (paper 000), Table 2"."""
    return _NUMBERED.sub(lambda found: f"{PAPERS[found[2]].short} (paper {found[2]})", text)


def papers_in(text: str) -> Iterator[Paper]:
    """The five papers that a text names, by name or number."""
    for paper in PAPERS.values():
        if re.search(rf"(?<![\w-]){re.escape(paper.short)}(?![\w-])", text) or re.search(
            rf"\b[Pp]aper {paper.number}\b", text
        ):
            yield paper


def terms_in(text: str) -> Iterator[Term]:
    """The words of a text that are explained here, in the order of TERMS."""
    return (term for term in TERMS if term.stands_in(text))
