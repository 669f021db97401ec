from collections import Counter

from loadtest.workload import FIRST_TOKEN_ID, longest, multi_turn, random_tokens, text


def test_random_prompts_have_the_lengths_asked_for_and_ids_inside_the_vocabulary() -> None:
    samples = random_tokens(20, input_len=32, output_len=8, vocab_size=100)
    assert {len(sample.prompt) for sample in samples} == {32}
    assert {sample.max_tokens for sample in samples} == {8}
    ids = [token_id for sample in samples for token_id in sample.prompt]
    assert min(int(token_id) for token_id in ids) >= FIRST_TOKEN_ID
    assert max(int(token_id) for token_id in ids) < 100


def test_lengths_spread_over_the_whole_range_and_not_beyond() -> None:
    samples = random_tokens(400, input_len=10, output_len=10, range_ratio=0.5)
    assert {len(sample.prompt) for sample in samples} == set(range(5, 16))
    assert {sample.max_tokens for sample in samples} == set(range(5, 16))


def test_lengths_are_rounded_outwards_and_never_nothing() -> None:
    samples = random_tokens(300, input_len=5, output_len=1, range_ratio=0.1)
    assert {len(sample.prompt) for sample in samples} == {4, 5, 6}
    assert {sample.max_tokens for sample in samples} == {1, 2}
    assert longest(5, 0.1) == 6
    assert longest(5, 0.0) == 5


def test_samples_of_different_seeds_share_no_prompt_and_no_beginning() -> None:
    for make in (random_tokens, text):
        seeds = [f"7, run {run}, repeat {repeat}" for run in range(4) for repeat in range(4)]
        drawn = [make(200, input_len=12, output_len=1, prefix_len=3, seed=seed) for seed in seeds]
        prompts = [sample.prompt for samples in drawn for sample in samples]
        assert len(set(prompts)) == len(prompts)
        prefixes = {str(samples[0].prompt).split()[0] for samples in drawn}
        assert len(prefixes) == len(seeds)


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    for make in (random_tokens, text):
        assert make(5, input_len=9, output_len=3, seed=1) == make(5, input_len=9, output_len=3, seed=1)
        assert make(5, input_len=9, output_len=3, seed=1) != make(5, input_len=9, output_len=3, seed=2)


def test_all_prompts_share_the_prefix_and_nothing_after_it() -> None:
    samples = random_tokens(5, input_len=8, output_len=1, prefix_len=16)
    assert len({sample.prompt[:16] for sample in samples}) == 1
    assert len({sample.prompt[16] for sample in samples}) > 1
    texts = [str(sample.prompt).split() for sample in text(5, input_len=8, output_len=1, prefix_len=16)]
    assert len({tuple(words[:16]) for words in texts}) == 1
    assert len({words[16] for words in texts}) == 5


def test_text_prompts_have_as_many_words_as_asked_for() -> None:
    assert {len(str(sample.prompt).split()) for sample in text(9, input_len=700, output_len=1)} == {700}


def test_each_beginning_is_shared_by_as_many_prompts_and_not_in_turn() -> None:
    ids = random_tokens(12, input_len=4, output_len=1, prefix_len=8, num_prefixes=3)
    words = text(12, input_len=4, output_len=1, prefix_len=8, num_prefixes=3)
    for beginnings in (
        [str(sample.prompt[:8]) for sample in ids],
        [" ".join(str(sample.prompt).split()[:8]) for sample in words],
    ):
        assert sorted(Counter(beginnings).values()) == [4, 4, 4]
        assert beginnings != beginnings[:3] * 4
    assert len({sample.prompt for sample in ids}) == len({sample.prompt for sample in words}) == 12


def test_conversations_have_turns_pauses_and_a_system_message_that_they_share() -> None:
    drawn = multi_turn(
        40, num_turns=4, input_len=6, output_len=8, range_ratio=0.5, prefix_len=5, think_time_s=2.0, seed=3
    )
    assert {len(talk.turns) for talk in drawn} == {2, 3, 4, 5, 6}
    assert {len(talk.pauses_s) == len(talk.turns) - 1 for talk in drawn} == {True}
    pauses_s = [pause_s for talk in drawn for pause_s in talk.pauses_s]
    assert 1.0 < sum(pauses_s) / len(pauses_s) < 3.0
    assert {len(talk.system.split()) for talk in drawn} == {5}
    assert len({talk.system for talk in drawn}) == 1
    said = [turn.prompt for talk in drawn for turn in talk.turns]
    assert len(set(said)) == len(said)
    others = multi_turn(2, num_turns=2, input_len=6, output_len=8, seed=4)
    assert (others[0].system, others[0].pauses_s) == ("", ())
    assert not {turn.prompt for talk in others for turn in talk.turns} & set(said)
