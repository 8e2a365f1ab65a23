"""What a head and a replica must agree on."""

from vllm_omni_plugin.replicas.agreement import differences


def test_equal_fingerprints_differ_in_nothing() -> None:
    assert differences({"dtype": "bfloat16"}, {"dtype": "bfloat16"}) == []


def test_each_difference_names_the_field_and_both_values() -> None:
    head = {"model": "a", "dtype": "bfloat16", "stage": "0"}
    replica = {"model": "b", "dtype": "float16", "stage": "0"}
    assert differences(head, replica) == [
        "dtype: head has bfloat16, replica float16",
        "model: head has a, replica b",
    ]


def test_a_field_that_one_end_does_not_know_is_a_difference() -> None:
    assert differences({"LoRA": "off"}, {}) == ["LoRA: head has off, replica nothing"]
    assert differences({}, {"LoRA": "off"}) == ["LoRA: head has nothing, replica off"]
