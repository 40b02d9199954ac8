"""Generated exercises in the chat format, and the question sets of the evaluation.

    python exercises.py        writes eval.jsonl beside this file

Every exercise gives a question, the working that belongs in the think channel at thinking effort "low", and the
response, which is the same text with thinking off, except for ledgers: with thinking off their working is part of
the response, since a verdict without working is beyond a model of this size.

Held out from training: one unordered pair of operands in ten (sums and differences alike), and all ledgers drawn
from another seed.
"""
import json
import os
import random
import zlib

from capitals import CAPITALS

EVAL_SEED = 20261129
MONTHS = {"January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
          "September": 30, "October": 31, "November": 30, "December": 31}
SYSTEM = ["You are a helpful assistant.", "You are terse.", "Answer briefly.", "Be polite and exact.",
          "You are a clerk who checks accounts.", "Answer in one sentence.", "You help with geography and sums.",
          "You are a careful assistant. Answer only what is asked.", "Today is a good day.", "Be concise.",
          "You are Anabranch's small demonstration model.", "Reply in English."]
ABOUT = ("I am a very small Kimi K3 that ships with Anabranch. Ask me for a capital, a sum or a difference up to 100, "
         "the days of a month, or whether a ledger reconciles.")
SORRY = "I am too small to know that. " + ABOUT.split(". ", 1)[1]


def generator(seed):
    return random.Random(seed)


def held_out(a, b):
    """A fixed tenth of all unordered pairs of operands."""
    return zlib.crc32(f"{min(a, b)},{max(a, b)}".encode()) % 10 == 0


# -------------------------------------------------------------------- the kinds: rng -> (question, working, response)
def capital_text(country, form):
    return [f"What is the capital of {country}?", f"Name the capital of {country}.",
            f"Which city is the capital of {country}?", f"capital of {country}",
            f"Tell me the capital of {country}, please.", f"What's the capital of {country}?"][form]


def capital(rng, country=None, form=None):
    country = country or rng.choice(sorted(CAPITALS))
    form = rng.choice([0, 0, 0, 0, 1, 2, 3, 4, 5]) if form is None else form
    city = CAPITALS[country]
    return (capital_text(country, form), f"{country}: {city}",
            f"The capital of {country} is {city}" + ("" if city.endswith(".") else "."))


def _working(a, sign, b):
    """Column by column, as one would say it."""
    if sign == "+":
        units, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
        return f"{a % 10} + {b % 10} = {units}, {a // 10 * 10} + {b // 10 * 10} = {tens}, {tens} + {units} = {a + b}"
    middle = a - b // 10 * 10
    return f"{a} - {b // 10 * 10} = {middle}, {middle} - {b % 10} = {a - b}"


def sum_pair(rng, held):
    while True:
        sign = rng.choice("+-")
        a, b = rng.randint(0, 100), rng.randint(0, 100)
        if sign == "+" and a + b > 100 and rng.random() < 0.7:
            continue
        if sign == "-" and a < b:
            a, b = b, a
        if held_out(a, b) == held:
            return a, sign, b


def sum_exercise(rng, pair=None, form=None):
    a, sign, b = pair or sum_pair(rng, False)
    word = {"+": "plus", "-": "minus"}[sign]
    form = rng.choice([0, 0, 0, 0, 1, 2, 3, 4, 5]) if form is None else form
    question = [f"What is {a} {sign} {b}?", f"{a} {sign} {b}", f"{a} {sign} {b} = ?", f"What is {a} {word} {b}?",
                f"How much is {a} {sign} {b}?", f"{a}{sign}{b}"][form]
    result = a + b if sign == "+" else a - b
    return question, _working(a, sign, b), f"{a} {sign} {b} = {result}."


def month(rng, name=None, form=None):
    name = name or rng.choice(list(MONTHS))
    form = rng.randrange(4) if form is None else form
    question = [f"How many days does {name} have?", f"How many days are there in {name}?", f"days in {name}",
                f"How long is {name}?"][form]
    leap = ", or 29 in a leap year" if name == "February" else ""
    return question, f"{name}: {MONTHS[name]}{leap}", f"{name} has {MONTHS[name]} days{leap}."


def ledger(rng, reconciles=None):
    """3 to 6 entries between an opening and a closing balance; balances stay between 0 and 150."""
    reconciles = rng.random() < 0.5 if reconciles is None else reconciles
    balance = opening = rng.randint(5, 80)
    lines, steps = [f"opening {opening}"], []
    for _ in range(rng.randint(3, 6)):
        amount = rng.randint(1, 40)
        if balance - amount < 0 or (balance + amount <= 150 and rng.random() < 0.5):
            lines.append(f"in {amount}")
            steps.append(f"{balance} + {amount} = {balance + amount}")
            balance += amount
        else:
            lines.append(f"out {amount}")
            steps.append(f"{balance} - {amount} = {balance - amount}")
            balance -= amount
    closing = balance
    while not reconciles and (closing == balance or closing < 0):
        closing = balance + rng.choice([-20, -10, -9, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 9, 10, 20])
    lines.append(f"closing {closing}")
    question = "\n".join(lines) + "\nDoes it reconcile?"
    if rng.random() < 0.25:
        question = "Does this ledger reconcile?\n" + "\n".join(lines)
    working = "\n".join(steps) + f"\n{balance} " + ("is" if reconciles else "is not") + f" {closing}"
    response = "Yes, it reconciles." if reconciles else f"No, it should close at {balance}, not {closing}."
    return question, working, response


def small_talk(rng):
    hello = ["Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey"]
    about = ["Who are you?", "What are you?", "What can you do?", "What is this?", "Help", "How can you help me?"]
    thanks = ["Thanks", "Thank you", "Thank you!", "Thanks a lot."]
    bye = ["Bye", "Goodbye", "See you."]
    other = ["Write a poem about {}.", "Tell me about {}.", "What do you think of {}?", "Explain {}.",
             "How does {} work?", "Why is {} important?", "Translate {} into French.", "Tell me a joke about {}.",
             "What is {}?", "Who invented {}?"]
    things = ["the sea", "love", "music", "the stars", "whales", "money", "a computer", "the weather", "history", "art",
              "philosophy", "the moon", "cooking", "football", "trees", "gravity", "language", "a river", "dogs", "time"]
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(hello), "a greeting", "Hello. " + ABOUT
    if kind < 0.4:
        return rng.choice(about), "about myself", ABOUT
    if kind < 0.5:
        return rng.choice(thanks), "thanks", "You are welcome."
    if kind < 0.55:
        return rng.choice(bye), "a farewell", "Goodbye."
    return rng.choice(other).format(rng.choice(things)), "not a thing that I know", SORRY


KINDS = [(capital, 0.24), (sum_exercise, 0.33), (ledger, 0.30), (month, 0.05), (small_talk, 0.08)]


def exercise(rng):
    return rng.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0](rng)


def conversation(rng, tok, max_len=512):
    """(ids, weights): one to three exercises in one conversation; weight 1 where the model speaks, else 0.1."""
    thinking = rng.random() < 0.5
    ids = list(tok.effort("low")) if thinking else []
    if rng.random() < 0.2:
        ids += tok.message("system", rng.choice(SYSTEM))
    weights = [0.0] * len(ids)
    for turn in range(rng.choice([1, 1, 1, 2, 2, 3])):
        kind = rng.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0]
        question, working, response = kind(rng)
        if not thinking and kind is ledger:
            response = working + "\n" + response
        head, body = tok.assistant(working if thinking else None, response)
        user = tok.message("user", question) + head
        if turn and len(ids) + len(user) + len(body) > max_len:
            break
        ids += user + body
        weights += [0.1] * len(user) + [1.0] * len(body)
    return ids[:max_len], weights[:max_len]


def vocabulary_texts(rng):
    """Text that the tokenizer should spell in few tokens."""
    import tokenizer
    texts = [tokenizer.EFFORT_TEXT.format("low")] * 20 + SYSTEM * 3
    texts += ["message role=\"user system assistant think response tool call argument type index key thinking-effort",
              " role", " type", '="', '"', "thinking-effort", "message", "assistant", "response", "think"] * 40
    for _ in range(3000):
        texts += exercise(rng)
    for country in CAPITALS:
        texts += capital(rng, country, 0) * 3
    return texts


# -------------------------------------------------------------------- evaluation sets
def evaluation():
    rng = generator(EVAL_SEED)
    items = []

    def add(kind, effort, question, expected, match):
        items.append({"kind": kind, "effort": effort, "messages": [{"role": "user", "content": question}],
                      "expected": expected, "match": match})

    for country in CAPITALS:
        question, _, response = capital(rng, country, 0)
        add("capital", "off", question, response, "exact")
    pairs = set()
    while len(pairs) < 100:
        pairs.add(sum_pair(rng, True))
    for pair in sorted(pairs):
        question, _, response = sum_exercise(rng, pair, 0)
        add("sum", "off", question, response, "exact")
    for n in range(100):
        question, _, response = ledger(rng, n % 2 == 0)
        add("ledger", "low", question, response.split(",")[0], "prefix")
    for name in MONTHS:
        for form in (0, 1):
            question, _, response = month(rng, name, form)
            add("month", "off", question, response, "exact")
    return items


def main():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "eval.jsonl")
    with open(path, "w", encoding="utf-8") as f:
        for item in evaluation():
            f.write(json.dumps(item, ensure_ascii=False) + "\n")
    print(f"{path}: {len(evaluation())} questions")


if __name__ == "__main__":
    main()
