"""How many parameters the released models have, by preset."""

# Parameters of the released checkpoints: `num_parameters()` of the models of these names on the Hugging Face hub.
PUBLISHED = {
    'gpt2-124m': 124_439_808, 'gpt2-355m': 354_823_168, 'gpt2-774m': 774_030_080, 'gpt2-1.5b': 1_557_611_200,
    'llama2-7b': 6_738_415_616, 'llama2-13b': 13_015_864_320, 'llama2-70b': 68_976_648_192,
    'llama3-8b': 8_030_261_248, 'llama3-70b': 70_553_706_496, 'llama3-405b': 405_853_388_800,
    'llama3.1-8b': 8_030_261_248, 'llama3.1-70b': 70_553_706_496, 'llama3.1-405b': 405_853_388_800,
    'llama3.2-1b': 1_235_814_400, 'llama3.2-3b': 3_212_749_824, 'llama3.3-70b': 70_553_706_496,
    'mistral-7b-v0.1': 7_241_732_096, 'mistral-7b-v0.3': 7_248_023_552,
    'mistral-nemo-12b': 12_247_782_400, 'mistral-small-24b': 23_572_403_200,
    'qwen2-0.5b': 494_032_768, 'qwen2-1.5b': 1_543_714_304, 'qwen2-7b': 7_615_616_512, 'qwen2-72b': 72_706_203_648,
    'qwen2.5-0.5b': 494_032_768, 'qwen2.5-1.5b': 1_543_714_304, 'qwen2.5-3b': 3_085_938_688,
    'qwen2.5-7b': 7_615_616_512, 'qwen2.5-14b': 14_770_033_664, 'qwen2.5-32b': 32_763_876_352,
    'qwen2.5-72b': 72_706_203_648,
    'qwen3-0.6b': 596_049_920, 'qwen3-1.7b': 1_720_574_976, 'qwen3-4b': 4_022_468_096, 'qwen3-8b': 8_190_735_360,
    'qwen3-14b': 14_768_307_200, 'qwen3-32b': 32_762_123_264,
    'mixtral-8x7b': 46_702_792_704, 'mixtral-8x22b': 140_620_634_112, 'qwen1.5-moe-a2.7b': 14_315_784_192,
    'qwen3-30b-a3b': 30_532_122_624, 'qwen3-235b-a22b': 235_093_634_560, 'qwen3-next-80b-a3b': 79_674_391_296,
    # Of the text models, in the headers of the released files, without vision tower and multi-token prediction
    'qwen3.5-0.8b': 752_393_024, 'qwen3.5-2b': 1_881_825_088, 'qwen3.5-4b': 4_205_751_296, 'qwen3.5-9b': 8_953_803_264,
    'qwen3.5-27b': 26_895_998_464, 'qwen3.5-35b-a3b': 34_660_610_688, 'qwen3.5-122b-a10b': 122_111_526_912,
    'qwen3.5-397b-a17b': 396_346_350_336,
    'gemma-2b': 2_506_172_416, 'gemma-7b': 8_537_680_896,
    'gemma2-2b': 2_614_341_888, 'gemma2-9b': 9_241_705_984, 'gemma2-27b': 27_227_128_320,
    'gemma3-270m': 268_098_176, 'gemma3-1b': 999_885_952,
    'olmo2-1b': 1_484_916_736, 'olmo2-7b': 7_298_617_344, 'olmo2-13b': 13_716_198_400, 'olmo2-32b': 32_234_279_936,
    'smollm-135m': 134_515_008, 'smollm-360m': 361_821_120, 'smollm-1.7b': 1_711_376_384,
    'smollm2-135m': 134_515_008, 'smollm2-360m': 361_821_120, 'smollm2-1.7b': 1_711_376_384,
    'smollm3-3b': 3_075_098_624,
    # Of the text models: 108,641,793,536 and 401,583,781,376, less the 871,932,416 of vision tower and projector
    'llama4-scout-17b-16e': 107_769_861_120, 'llama4-maverick-17b-128e': 400_711_848_960,
    'gpt-oss-20b': 20_914_757_184, 'gpt-oss-120b': 116_829_156_672,
    'phi3-mini-4k': 3_821_079_552, 'phi3.5-mini': 3_821_079_552, 'phi3-medium-4k': 13_960_238_080,
    'phi4-14b': 14_659_507_200, 'phi4-mini': 3_836_021_760,
    'olmo3-7b': 7_298_011_136, 'olmo3-32b': 32_233_522_176, 'olmoe-1b-7b': 6_919_161_856,
    'pythia-14m': 14_067_712, 'pythia-31m': 30_494_720, 'pythia-70m': 70_426_624, 'pythia-160m': 162_322_944,
    'pythia-410m': 405_334_016, 'pythia-1b': 1_011_781_632, 'pythia-1.4b': 1_414_647_808,
    'pythia-2.8b': 2_775_208_960, 'pythia-6.9b': 6_857_302_016, 'pythia-12b': 11_846_072_320,
    'gpt-neox-20b': 20_554_567_680, 'phi1.5-1.3b': 1_418_270_720, 'phi2-2.7b': 2_779_683_840,
    'mamba2-130m': 128_989_632, 'mamba2-370m': 368_346_624, 'mamba2-780m': 780_161_280, 'mamba2-1.3b': 1_343_757_312,
    'mamba2-2.7b': 2_702_599_680, 'codestral-mamba-7b': 7_285_403_648,
    'stablelm-3b': 2_795_443_200, 'command-r7b': 8_028_033_024, 'command-a-111b': 111_057_580_032,
}  # fmt: skip
# Checkpoints with a vision tower too: embedding and other parameters of the text model in millions, as the paper's
# table 1 rounds them (arXiv:2503.19786). seqax's are named by their size without the embedding and the unembedding.
ABOUT = {
    'stablelm2-1.6b': (1_644_417_024, 0.0001),  # its card leaves the biases of the layers' norms out
    'granite3.0-2b': (2.5e9, 0.02), 'granite3.0-8b': (8.1e9, 0.01),  # as their cards round them
    'granite3.3-2b': (2.5e9, 0.02), 'granite3.3-8b': (8.1e9, 0.01),
    'minitron-4b': (4.19e9, 0.001), 'minitron-8b': (8.27e9, 0.001),  # arXiv:2407.14679, table 1
    # Their cards leave the embeddings out.
    'exaone4-1.2b': (1.07e9 + 102400 * 2048, 0.005), 'exaone4-32b': (30.95e9 + 2 * 102400 * 5120, 0.001),
    'gemma3-4b': (675e6 + 3209e6, 0.002), 'gemma3-12b': (1012e6 + 10759e6, 0.002), 'gemma3-27b': (1416e6 + 25600e6,
    0.002),
    'gemma4-31b': (30.7e9, 0.001),  # as its card rounds it
    # Table 1 of arXiv:2508.06471 counts the layer of multi-token prediction, and no embeddings. The files of MiniMax M2
    # on the hub have 228,703,644,928 numbers, one in 16,384 of them a scale of FP8.
    'glm4.5': (355e9 - 3.99e9 + 2 * 151552 * 5120, 0.001), 'glm4.6': (355e9 - 3.99e9 + 2 * 151552 * 5120, 0.001),
    'glm4.5-air': (106e9 + 2 * 151552 * 4096, 0.005), 'minimax-m2': (228_703_644_928 * 16384 / 16385, 0.00001),
    'qwen2-57b-a14b': (57.41e9, 0.001), 'deepseek-v2-lite': (15.7e9, 0.001), 'deepseek-v2': (236e9, 0.002),
    'deepseek-v3': (671e9, 0.001), 'kimi-k2': (1.04e12, 0.02), 'moonlight-16b-a3b': (15.29e9 + 2 * 163840 * 2048,
    0.001),
    'seqax-84m': (84e6 + 2 * 32768 * 512, 0.25), 'seqax-270m': (270e6 + 2 * 32768 * 1024, 0.25),
    'seqax-540m': (540e6 + 2 * 32768 * 2048, 0.25), 'seqax-1b': (1e9 + 2 * 32768 * 2048, 0.25),
    'seqax-2b': (2e9 + 2 * 32768 * 4096, 0.25),
}  # fmt: skip
