"""The scripted model's turns, by episode name. One dictionary for all, because a server reads it once."""

import json

from rig.miniswe import WRITE_AND_LIST


def call(arguments, name="bash"):
    """A tool call as Qwen3 writes it; `arguments` given as a string are inserted unchanged."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def think(thought, text=""):
    return f"<think>\n{thought}\n</think>\n\n{text}"


EPISODES = {
    "count": [think("Small first.", "One, two."), think("I count.", ", ".join(map(str, range(1000, 1050))) + "."), think("ok", "Three.")],
    "late": [
        think("I look first.", "Let me look.\n" + call({"command": "ls"}) + "\nThen I read — naïve café ☕."),
        think("ok", "Done ☕."),
    ],
    "tidy": [  # as the template writes it
        think("I look first.", call({"command": "ls -la"})),
        think("So it is.", "All is well, as café ☕ should be."),
        think("Once more.", "I look again.\n" + call({"command": "cat a.txt"})),
        think("As before.", "Nothing new."),
        think("Again?", "Nothing at all."),
    ],
    "see": [think("I look closely.", "A square, naïve in its colours ☕."), "Another one.", think("Hm.", "A third."), "The last one."],
    "placeholder": ["I write <|image_pad|>, as if I could draw.", "No more of it."],
    "hello": [
        think("A greeting wants a greeting.", "Hello there, friend — naïve café ☕.  "),
        "Once more, without thinking.",
        think("Enough.", "Goodbye."),
    ],
    "tools": {
        "turns": [
            (
                "<think>\nI should list the files first.\n</think>\n\n  Let me look — naïve café ☕.\n"
                '<tool_call>\n{"name": "bash",  "arguments": {"timeout": 10, "command": "ls  -la\\n"}}\n</tool_call>'
            ),
            think("Now write.", call({"command": "echo hi > a.txt"}) + "\n" + call({"command": "cat a.txt"})),
            think("Done.", "All done.  "),
        ],
        "side": "Side answer.",
    },
    "agent": [
        think("I look first, for I know nothing of this place.", "Looking around.\n" + call('{"timeout": 10.0,  "command": "ls  -la"}')),
        call({"command": "grep -rn 'naïve' . | head -3 # ☕"}),
        think("Two at once.", "\n".join((call({"command": "cat a.txt"}), call("{}", name="note"), call({"command": "wc -l a.txt"})))),
        think("Now the fix.", "  I change one line.\n\n" + call({"command": "python - <<'E'\nprint(\"x\")\nE\n", "timeout": 1.5})),
        think("That was all.", 'Done: the file says "x", and `wc` agrees.  \n'),
        think("Again?", "Yes, it is done."),
    ],
    "talk": [
        think("Short.", "The answer is 42 — or so they say.\n\n  "),
        think("A list helps.", "1. first\n2. second\n\n```python\nprint('hello   world')\n```\n"),
        think("", "Straße, 東京, 🙂🙃, café, e\u0301."),
        think("Numbers: 1234567890, 3.14159.", "\tTabs\tand  double  spaces , and a number: 1234567890."),
        think("Last words.", "Goodbye, and thank you for all the questions."),
    ],
    "odd": [
        think("", call('{ "command" : "echo \\u00e9 \\ud83d\\ude42" , "timeout" : 1e2 }')),
        think("Nested.", call('{"command": "x", "env": {"b": [1, 2.0, null, true], "a": ""}}')),
        think("Nothing to say.", call("{}", name="note")),
        think("", "a"),
        think("Angle brackets.", "if a < b and b > c: <not a tag> </neither> && done;"),
    ],
    "badcall": [
        '<tool_call>\n{"name": "bash", "arguments": {"command": oops}}\n</tool_call>',
        think("That was no JSON.", "Sorry. I try again."),
        think("Better.", call({"command": "true"})),
        think("Fine.", "It worked."),
    ],
    "stops": [
        think("I count.", "One, two, three. HALT here, then four, five."),
        think("More.", "Six, seven, eight. HALT again, nine."),
        think("End.", "Ten."),
    ],
    "spoken": [
        think(
            "Two at once — naïve ☕.",
            "  Both, then.\n" + call('{"command" : "ls  -la # ☕",  "timeout": 10.0 }') + "\n" + call("{}", name="note"),
        ),
        call('{"command": "grep \\u6771\\u4eac .", "timeout": 1e1}'),
        think("", "Straße, 🙂🙃.\n\n" + call({"command": "cat <<'E'\n\"x\"\tÄ\nE\n"})),
        think("The same twice.", "\n".join((call({"command": "true"}), call({"command": "true"})))),
        think("That is all.", '  It says "x"  — as it should.  \n'),
        think("Again?", "Yes: 東京."),
    ],
    "plain": ["First answer, without any thought.", "Second answer.\n" + call({"command": "ls"}), "Third answer; that is all."],
    "cut": [think("Naïve ☕.", "Both 🙂.\n" + call('{"command" : "ls  # ☕"}') + "\n" + call("{}", name="note"))],
    "fleet": [
        think(
            " ".join(f"{n} — naïve ☕ {n * 37}," for n in range(12)),
            "東京, 🙂🙃, Straße: "
            + ", ".join(f"{n}. item é {n * 53}" for n in range(60))
            + ".\n"
            + call({"command": "echo '" + " ".join(f"☕{n * 71}" for n in range(12)) + "'", "timeout": 10.5})
            + "\n"
            + call({"command": "ls  -la # 🙂"}),
        ),
        think("ok", "That is all. 🙂"),
    ],
    "long": [think("hm", "word and word " * 6000)],
    "gym": [
        think("Thin: the synonym is␟ Skin␟ny␟.", call({"synonym": "Sk␟inny"}, name="get_synonym_value")),
        think("And␟ In␟visible␟.", "The next one is␟ In␟visible␟.\n" + call({"synonym": "In␟vis␟ible"}, name="get_synonym_value")),
        think("Both, in order.", call('{"synonym_values" : [6␟36, 9␟33]}', name="extract_synonym_values")),
        think("All done.", "So:␟ Skin␟ny␟ and␟ In␟visible␟ — what a␟ Clim␟b␟.  "),
    ],
    "search": [think("What is it?", f"<search>␟Skin␟ny␟ café {n}</search> then I guess") for n in range(3)],
    "react": [
        think("hm", 'Thought: look first\nAction: search\nAction Input: {"q": "Skinny Invisible"}'),
        think("hm", 'Thought: again\nAction: search\nAction Input: {"q": "café"}\nObservation: a guess'),
        think("ok", "Final Answer: 4"),
    ],
    "essay": [think("", "One two three four five six Skinny Invisible Climb seven eight nine ten eleven."), think("x", "Fine.")],
    "items": [
        think(
            "After </tool_call> I go on.",
            "Look.\n" + call({"command": "ls  -la"}) + "\n" + call({"command": "cat " + "very " * 40 + "long"}),
        ),
        think("x", "Done."),
    ],
    "miniswe": WRITE_AND_LIST,
}
