"""Three tasks for lm-eval that need no network: YAML files, and twenty items written for this project."""

import json
from collections import defaultdict
from pathlib import Path

# What happens, how it may go on (the first is true), and one word of the answer to "what is there?"
ITEMS = (
    ("The kettle whistles, so Ana", ("turns off the stove.", "plants a tree."), "kettle"),
    ("It rains on the tent, and the campers ", ("stay inside.", "paint the moon."), "tent"),
    ("The bus is late, so the driver", ("takes the short road.", "eats the timetable."), "bus"),
    ("A bell rings and the pupils", ("leave the room.", "melt in the sun."), "bell"),
    ("The soup is too hot, so she", ("waits a while.", "waits for a train to the soup."), "soup"),
    ("The lamp flickers, and he", ("changes the bulb.", "feeds it with hay."), "lamp"),
    ("The cat hears a noise and", ("hides under the bed.", "reads the newspaper."), "cat"),
    ("The bread is stale, so the baker ", ("makes crumbs of it.", "sings it to sleep."), "bread"),
    ("The bridge is closed, and the carts", ("take the ferry.", "fly over the hill."), "bridge"),
    ("The clock stops, so the old man", ("winds it up.", "boils it for lunch."), "clock"),
    ("Snow covers the path, and Omar", ("fetches a shovel.", "waters the snow."), "snow"),
    ("The rope is torn, so the sailor", ("ties a knot.", "drinks the rope."), "rope"),
    ("The door creaks, and Mia", ("oils the hinge.", "asks it for a song."), "door"),
    ("The well is dry, so the farmer", ("digs deeper.", "sells the rain."), "well"),
    ("The kite is stuck, and the boy", ("climbs the tree.", "buys the wind."), "kite"),
    ("The paint is wet, so nobody ", ("touches the bench.", "knows the colour blue."), "paint"),
    ("The fire goes out, and the guests", ("go home.", "become younger."), "fire"),
    ("The map is old, so the hikers", ("lose their way.", "iron the mountains."), "map"),
    ("The piano is out of tune, and Lea", ("calls a tuner.", "calls a dentist."), "piano"),
    ("The ice cracks, so the skaters", ("turn back — quickly.", "order tea."), "ice"),
)

_DATA = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
metadata:
  version: 1.0
"""
_TASKS = {
    "own_endings": """output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{endings}}"
doc_to_target: 0
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "own_texts": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{story}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "own_answers": """output_type: generate_until
doc_to_text: "{{text}} There is a"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: [".", "\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
}
NAMES = ",".join(_TASKS)


def write_tasks(folder: Path) -> Path:
    """Write the items and the three tasks; return the folder, for --tasks_path and lm-eval's include_path."""
    folder.mkdir()
    file = folder / "items.jsonl"
    with open(file, "w", encoding="utf-8") as lines:
        for number, (text, endings, answer) in enumerate(ITEMS):
            # Stories of one to five sentences: some are longer than the context.
            items = ITEMS[number : number + 1 + number % 5]
            story = " ".join(f"{a.strip()} {b[0]}" for a, b, _ in items)
            row = {"text": text, "endings": endings, "answer": answer, "story": story}
            lines.write(json.dumps(row) + "\n")
    for name, content in _TASKS.items():
        settings = f"task: {name}\n{_DATA.format(file=file)}{content}"
        (folder / f"{name}.yaml").write_text(settings)
    return folder


# CORE's evaluation bundle with self-written items; sizes that are powers of two have the same means in fp32.
_CORE = (  # label, type, file, examples, delimiter, baseline in percent
    ("own_choices_zeroshot", "multiple_choice", "own/choices.jsonl", 0, " ", 50),
    ("own_choices", "multiple_choice", "own/choices.jsonl", 3, "\nAnswer: ", 50),
    ("own_schema", "schema", "own/schema.jsonl", 2, " ", 40),
    ("own_words", "language_modeling", "own/words.jsonl", 5, "\nAnswer : ", 0),
    ("own_repeats", "language_modeling", "own/repeats.jsonl", 3, " ", 0),
)


def write_bundle(folder: Path) -> Path:
    """Write a bundle of five tasks of all three types, 16 items each."""
    items = ITEMS[:16]
    rows: dict[str, list[dict[str, object]]] = defaultdict(list)
    for number, (text, (true, false), word) in enumerate(items):
        other, flip = items[number - 3][0].strip(), number // 4 % 2
        choices, gold = [true, false], flip
        if number % 4 == 0:  # one option begins with the other, first or last, right or wrong
            choices, gold = [true, f"{true} Yes."], number // 8
        choices = choices[:: 1 - 2 * flip]
        rows["choices"].append({"query": text.strip(), "choices": choices, "gold": gold})
        starts = [text.strip(), other][:: 1 - 2 * flip]
        rows["schema"].append({"context_options": starts, "continuation": true, "gold": flip})
        answer = (word, ":", ": :")[number % 3]  # an untrained model repeats the last token
        rows["words"].append({"context": f"{text} There is a ", "continuation": answer})
        said = f"{word} " * (number % 3 + 1)
        rows["repeats"].append({"context": said, "continuation": word})
    for name, some in rows.items():
        file = folder / "eval_data" / "own" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in some))
    settings, table = "icl_tasks:\n", "Eval Task,Task Category,Random baseline\n"
    for label, kind, file, shots, delimiter, baseline in _CORE:
        settings += f"- label: {label}\n  dataset_uri: {file}\n  num_fewshot: [{shots}]\n"
        settings += f"  icl_task_type: {kind}\n"
        settings += f"  continuation_delimiter: {json.dumps(delimiter)}\n" * (delimiter != " ")
        table += f"{label},own,{baseline}\n"
    (folder / "core.yaml").write_text(settings)
    (folder / "eval_meta_data.csv").write_text(table)
    return folder
