# %% [markdown] lang="en"
# # Lab 06 · The paired experiment
#
# From which context length on is a quantized KV cache worth its cost? In this
# lab you do not write a cache. You run a measurement that somebody else can
# repeat, you read its result, and you judge what it proves.
#
# The same model reads the same tokens twice. Once it keeps its Keys and Values
# in a `DynamicCache`, which holds them as they are: the **baseline**. Once it
# keeps them in a `QuantizedCache` with 4 bits: the **candidate**. Everything
# else is equal, so what differs comes from the cache and, for times, from the
# noise of the machine.
#
# **After this lab you can**
#
# - plan a paired measurement, and say before it runs what would count as success;
# - run it on a laptop or on an NVIDIA GPU, and resume it when it was cut off;
# - read the table of memory, time and quality without taking a diagnostic for a
#   gate;
# - say which conclusions follow from one run, and which do not.
#
# **You need** labs 01 to 03: the size of a KV cache, scales, and the window.
#
# **Time** about 40 minutes, of which the machine measures up to 5 on a laptop.
# **Difficulty** easy to run, harder to judge. This lab is optional and has no
# points.

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts kvlab/first_cell.py here

# %%
import textwrap
from importlib.util import find_spec
from pathlib import Path

from IPython.display import display
from kvlab import matrix, preflight
from kvlab.matrix import report
from kvlab.matrix.workload import CONTEXT, DEVICES, MODE_PROFILE, WINDOW

# %% [markdown] lang="en"
# ## Part 1 · Configure
#
# Three run modes use the same code.
#
# | `RUN_MODE` | what happens | needs |
# |---|---|---|
# | `"dry_run"` | shows the plan, loads nothing, measures nothing | nothing |
# | `"embedded_cpu"` | a model of 135 million parameters on your CPU, float32, contexts to 1,024 tokens, under 5 minutes on two cores | transformers, hqq; 93 MB once |
# | `"real_gpu"` | Qwen2.5-0.5B-Instruct on an NVIDIA GPU, bfloat16, contexts to 4,096 tokens | the same, CUDA, and the model hub |
#
# As it stands this notebook measures nothing. It shows the plan in parts 1 and
# 2, and in parts 3 and 4 it reads a result that was saved earlier. Change the
# mode when you want a result of your own.

# %%
RUN_MODE = "dry_run"  # "embedded_cpu" or "real_gpu" measures
RUN_LABEL = "mine"  # names the file of the result; each label is used once
MODEL = ""  # "" is the profile's own model; "embedded" needs no hub
REVISION = "main"  # branch, tag or commit of a hub model
LOCAL_FILES_ONLY = False  # True never asks the hub, only its cache

workload = matrix.profile(MODE_PROFILE[RUN_MODE])
if MODEL:
    workload = matrix.with_model(workload, MODEL, REVISION)
print(f"{RUN_MODE}: profile {workload.profile}, model {workload.model_id}")

# %% [markdown] lang="en"
# **Packages.** Colab has everything but `hqq`, and `gguf` for the embedded
# model. The next cell installs these two where they are missing, and only when
# you set the flag. It passes `--no-deps`, so pip touches no other package: your
# torch, numpy and IPython stay as they are.

# %%
INSTALL_MISSING = False

import subprocess
import sys

needed = ["hqq", "gguf"] if workload.model_id == "embedded" else ["hqq"]
missing = [name for name in needed if find_spec(name) is None]
if RUN_MODE == "dry_run":
    print("A dry run needs no further package.")
elif not missing:
    print("Nothing is missing.")
elif not INSTALL_MISSING:
    print(f"Missing: {', '.join(missing)}.")
    print("Set INSTALL_MISSING = True and run this cell again.")
else:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, *missing], capture_output=True, text=True)
    if done.returncode:
        print("pip could not install them:", done.stderr.strip()[-400:])
    else:
        print(f"Installed {', '.join(missing)}.")
    if "transformers" in sys.modules:
        print("Restart the kernel: transformers was loaded without them.")

# %% [markdown] lang="en"
# **The plan.** Two matrices. The *context matrix* makes the context longer and
# keeps the window: it asks when memory is saved. The *window matrix* keeps the
# context and changes the window: it asks what the window costs in time. Each
# cell is measured in rounds: the baseline, then each candidate, then the next
# round. So a laptop that grows warm slows all of them.

# %%
display(report.plan_table(matrix.planned_record(workload)))

# %% [markdown] lang="en"
# **The gates.** They were fixed before anybody measured. A row of the result is
# *accepted* when it passes all four.

# %%
gates = workload.acceptance
print("peak memory saved  > ", gates.peak_saved_bytes_above, "bytes")
print("NLL increase       <=", gates.nll_increase_at_most, "nats")
print("top-5 overlap      >=", gates.topk_overlap_at_least)
print("time ratio         <=", gates.latency_ratio_at_most)

# %% [markdown] lang="en"
# - **Peak memory saved**: the largest number of bytes that tensors took during
#   the run, above what was there before the prompt; baseline minus candidate.
# - **NLL increase**: both caches are fed the first tokens that the baseline
#   wrote. NLL is minus the logarithm of the probability that the model gives to
#   the token that comes next, in nats, averaged over the tokens.
# - **Overlap**: of the five tokens that the baseline finds most probable, the
#   share that the candidate has among its five. 1 means the same set.
# - **Time**: the median over the repeats, from the prompt to the last token.

# %% [markdown] lang="en"
# **Preflight.** Before a measurement this cell looks at what it needs, and
# quantizes one small tensor with `hqq`. It installs nothing. `blocked` means
# that the run cannot work; `warning` means that you should read the line.

# %%
if RUN_MODE == "dry_run":
    print("A dry run needs nothing, so there is nothing to check.")
else:
    rows = preflight.check(
        workload, DEVICES[RUN_MODE], local_files_only=LOCAL_FILES_ONLY
    )
    print(preflight.text(rows))

# %% [markdown] lang="en"
# ## Part 2 · Run
#
# The result is one JSON file, `results/RUN_MODE-RUN_LABEL.json`. It is written
# whole or not at all, and a label that is taken is refused. If the kernel dies
# half-way, run this cell again: finished measurements are kept and not made
# twice. Leave the machine alone meanwhile, because the time of everything else
# that runs is measured too.

# %%
RESULTS = report.results_folder()

if RUN_MODE == "dry_run":
    planned = matrix.planned_record(workload)
    print("\n".join(report.decision_lines(planned)))
else:
    try:
        written = matrix.run(
            RUN_MODE,
            RUN_LABEL,
            RESULTS,
            workload=workload,
            local_files_only=LOCAL_FILES_ONLY,
        )
        print(f"Wrote {written.name}.")
    except (matrix.RunRefused, matrix.RunFailed) as problem:
        print(problem)

# %% [markdown] lang="en"
# ## Part 3 · Read
#
# From here on nothing is measured and no model is loaded. The cells read one
# JSON file: the newest measured run in `results/`, which is yours if you have
# made one, else the one that comes with the course. Name another file in
# `RESULT` to read that.

# %%
RESULT = ""  # a path; "" takes the newest measured run

found = [Path(RESULT)] if RESULT else report.saved_runs(RESULTS)
record = report.load(found[0]) if found else None
if record is None:
    print("There is no saved result here. Set RUN_MODE in part 1 and run")
    print("part 2, or put a result file's path into RESULT.")
else:
    if find_spec("jsonschema") is None:
        print("jsonschema is missing: only the file's version was checked.")
    print(f"Read {found[0].name}.")
    display(report.run_table(record))

# %% [markdown] lang="en"
# ### Memory against context
#
# Read a row from left to right: how much lower the peak was, over the whole run
# and after the prefill; what the cache object itself holds, counted byte by byte
# from its tensors; and how often the window overflowed.

# %%
if record:
    display(report.memory_table(record, CONTEXT))


# %%
def show(name: str, finding: str) -> None:
    """One of the result's figures, and under it what it says."""
    plots.show(figures[name], alt=finding)
    print(textwrap.fill(finding, 78))


if record:
    figures = report.figures(record)
    show("capacity", report.capacity_finding(record))

# %% [markdown] lang="en"
# **Three lines, three meanings.** The broad pale line is what the cache holds
# less. It is the saving that lab 01 predicts. The solid line is what the *peak* fell
# by, and that is what decides whether a longer text fits. The two differ,
# because a run needs other memory as well: the activations of the prefill, and
# the tensors that the quantizer works on while it makes codes. Where these are
# larger than the cache, a smaller cache does not lower the peak, or it raises
# it. The dashed line leaves the prefill out and starts to count at the first
# new token.

# %% [markdown] lang="en"
# ### Time against window, and against context

# %%
if record:
    display(report.time_table(record, WINDOW))
    display(report.time_table(record, CONTEXT))

# %%
if record:
    show("latency", report.latency_finding(record))

# %% [markdown] lang="en"
# **What an overflow costs.** When the window of transformers' `QuantizedCache`
# is full, the cache restores all old tokens, joins the window to them and
# quantizes everything again. So an overflow costs more the longer the context
# is, and a small window overflows more often. Your lab 03 does it another way:
# a segment is written once and never touched again.
#
# The small dots are the single repeats. Where they scatter more than the lines
# differ, the order of the lines means nothing.

# %% [markdown] lang="en"
# ### Quality

# %%
if record:
    display(report.gates_table(record))
    natural = report.natural_table(record)
    if natural:
        display(natural)

# %%
if record:
    show("quality", report.quality_finding(record))

# %% [markdown] lang="en"
# **Two rulers.** The gates look at the tokens that the baseline wrote itself.
# There are few of them, and the prompt repeats one sentence, so the model is
# very sure of them: the standard error can be larger than the effect. That is
# why the table under it uses natural text and a few hundred tokens. **KL** is
# the distance between the two predictions, in nats for each token; 0 means that
# the candidate predicts what the baseline predicts.
#
# The JSON also says whether both caches wrote the same text
# (`greedy_output_exact_match`) and how the ratio of the NLLs is. These are
# *diagnostics*. A single close choice between two words turns the whole rest of
# a text around, so an equal text proves little and a different one too. No gate
# uses them.

# %% [markdown] lang="en"
# ### The decision

# %%
if record:
    print("\n".join(report.decision_lines(record)))

# %% [markdown] lang="en"
# ### Beside the published figures
#
# For the GPU profile there are figures of another machine. They stand here
# beside the figures of the file that you read, where both looked at the same
# place. They are there to compare the *shape*: does memory start to be saved at
# a longer context, does a larger window cost less time?

# %%
if record:
    display(report.reference_table(record))

# %% [markdown] lang="en"
# ### Several runs
#
# With more than one measured run in `results/` this cell puts them side by
# side. Runs of different `workload_version` are different experiments.

# %%
if len(found) > 1:
    display(report.comparison_table([report.load(path) for path in found[:4]]))
else:
    print("One run or none: nothing to compare.")

# %% [markdown] lang="en"
# ## Part 4 · Explain
#
# ### What follows from one run
#
# - **A mechanism, here.** For this model, on this machine, with these versions
#   of transformers and hqq: whether the quantized cache lowers the peak, from
#   which context on, and what it costs in time and in prediction quality.
# - **A decision that was fixed before.** `accept_local_cache_candidate` says that
#   at least one row passed every gate. `tune_cache_policy` says that none did.
#   Both words speak of the next step on this machine, and of no other one.
# - **A crossover, if there is one.** The first context that passes all gates. It
#   can lie in the middle: a longer context may save more memory and fail on
#   quality.
#
# ### What does not follow
#
# - **Nothing about load.** One request at a time, batch 1. The times here are no
#   time to first token and no time per token of a busy server.
# - **Nothing about vLLM or SGLang.** They have their own kernels, their own
#   allocator and other cache formats.
# - **No equality of texts.** A small KL says that the predictions are near, not
#   that the words are the same.
# - **Nothing about Keys per channel from the required candidate.** `hqq` on
#   axis 1 shares a scale among neighbouring channels of one token, for Keys and
#   for Values. The axes of lab 03 are another candidate: `quanto_kivi` in the
#   tables, where its token counts fit.
# - **Nothing about overflows in the context matrix.** Look at its last column:
#   if the count is 0, then only the prompt was quantized, once, and the error of
#   quantizing again and again is not in these rows.
# - **Nothing about other models.** Lab 03 showed that a shift of a few Key
#   channels can ruin one axis and leave the other alone. Whether a model has
#   such channels is a fact about that model.
# - **On a CPU, no GPU memory.** `embedded_cpu` reads its peaks from torch's
#   profiler, and its baseline is float32, twice the bytes of bfloat16. So the
#   share that is saved is larger than on a GPU for this reason alone.

# %% [markdown] lang="en"
# ### Move the gates
#
# A gate is a choice, made for a purpose. Here you can see how much of the
# decision hangs on it. Change a number and run the cell: it uses the figures in
# the file and measures nothing. What you may *not* do is choose the gates after
# you have seen the figures and then call the outcome a test.

# %%
NLL_AT_MOST = 0.05  # the plan says 0.50
OVERLAP_AT_LEAST = 0.90  # the plan says 0.60
TIME_AT_MOST = 1.25  # the plan says 2.00

for row in record["measurement_matrix"] if record else []:
    passes = (
        row["incremental_peak_saved_bytes"] > 0
        and row["fixed_continuation_nll_delta"] <= NLL_AT_MOST
        and row["mean_topk_overlap"] >= OVERLAP_AT_LEAST
        and row["latency_ratio_candidate_over_baseline"] <= TIME_AT_MOST
    )
    planned = "accepted" if row["eligible"] else "refused"
    yours = "accepted" if passes else "refused"
    print(f"{report.place(row):14} the plan: {planned:9} your gates: {yours}")

# %% [markdown] lang="en"
# ### Four questions to judge the result by
#
# Answer each in two sentences before you open it.
#
# <details><summary>1. The cache holds several times fewer bytes. Why did the
# peak not fall by the same number of bytes?</summary>
#
# The peak counts everything that was allocated at the worst moment. At the
# prefill that is mostly activations, and the quantizer's own work tensors are
# added for the candidate. What the cache saves is a part of the sum. The longer
# the context, the larger is that part.
# </details>
#
# <details><summary>2. An NLL increase is printed as +0.02 with a standard error
# of 0.03. Is the candidate worse?</summary>
#
# This figure cannot tell: zero lies within one standard error. It does say that
# the increase is unlikely to be as large as the gate's 0.50. For a finer answer
# use more tokens: the KL on natural text.
# </details>
#
# <details><summary>3. A colleague has a time ratio of 0.9 at batch 1 and 4,096
# tokens: the quantized cache was faster. What do you ask first?</summary>
#
# How it was measured. At batch 1 the weights are most of what a step reads, so
# even a cache of zero bytes could save only a few per cent of the time, and this
# cache restores all tokens at each step on top. Ask whether both sides were
# synchronised, warmed up and given the same number of tokens.
# </details>
#
# <details><summary>4. Which single further measurement would change your
# decision most?</summary>
#
# It depends on the refused gate. If memory was refused: a longer context or a
# larger batch. If quality was refused: mixed axes at the same bytes, or more
# bits. If time was refused: a larger window. In each case the gates stay as they
# are and the workload gets a new version.
# </details>

# %% [markdown] lang="en"
# ## What this shows, and what it does not
#
# **Shown.** One paired, repeatable measurement: the same model and tokens, two
# caches, gates that were fixed before, every repeat and every byte in one file.
# You can hand that file to somebody who has another machine, and compare.
#
# **Not shown.** That a quantized cache is good or bad in general. One model, one
# prompt, batch 1, one version of two libraries. The published figures come from
# another machine, and this course has not repeated them.
#
# **Where the ideas come from.** Keys per channel, Values per token and the
# residual window: KIVI (Liu and others, 2024, arXiv 2402.02750). The caches:
# `transformers.QuantizedCache` with the libraries hqq (Badri and Shaji, Mobius
# Labs) and optimum-quanto.
