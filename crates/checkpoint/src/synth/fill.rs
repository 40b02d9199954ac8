//! Random weights that keep activations sane.
//!
//! Every eight bytes of a tensor come from one output of splitmix64 (Steele, Lea and Flood, "Fast splittable
//! pseudorandom number generators", OOPSLA 2014) at a counter that depends on the seed, the tensor's name and the
//! position alone: any piece can be made by itself, in any order.

use super::plan::Tensor;
use crate::config::K3Config;
use crate::safetensors::Dtype;

/// The increment of splitmix64.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of splitmix64.
pub(crate) fn mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Output `n` of the generator that starts at `key`.
pub(crate) fn splitmix64(key: u64, n: u64) -> u64 {
    mix(key.wrapping_add(n.wrapping_add(1).wrapping_mul(GAMMA)))
}

/// Nearest bf16, ties to even; `value` is finite and far from the largest.
pub(crate) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// The root mean square of the sixteen E2M1 codes: squares 0, 1/4, 1, 9/4, 4, 9, 16, 36.
const E2M1_RMS: f64 = 2.926;
/// The root mean square of the factors 1/2, 1 and 2.
const THREE_SCALES_RMS: f64 = 1.323;

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fill {
    /// BF16, uniform in `middle` plus or minus `half`.
    Bf16 { middle: f32, half: f32 },
    /// F32, likewise; elements from `zeros_from` on are 0.
    F32 { middle: f32, half: f32, zeros_from: u64 },
    /// Two random E2M1 codes a byte.
    Codes,
    /// Scale bytes, uniform over `low`, `low + 1`, `low + 2`.
    Scales { low: u8 },
}

impl Fill {
    /// The fill of a tensor by its name.
    ///
    /// Matrices have variance gain^2 / columns. The gains keep the residual stream near 1, open the gates beyond their
    /// soft caps now and then, and spread the router's bias about as wide as its scores, so that tokens route apart.
    pub(crate) fn of(tensor: &Tensor, config: &K3Config) -> Fill {
        let name = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
        let last = name.rsplit('.').next().unwrap_or(name);
        let f32 = |middle, half| Fill::F32 {
            middle,
            half,
            zeros_from: u64::MAX,
        };
        match (tensor.dtype, last) {
            (Dtype::U8, "weight_packed") => Fill::Codes,
            (Dtype::U8, _) => {
                let columns = tensor.shape.dims().last().copied().unwrap_or(1) * 32;
                let gain = if name.contains(".w2.") { 1.0 } else { 2.0 };
                Fill::Scales {
                    low: scale_low(gain, columns),
                }
            }
            (Dtype::F32, "A_log") => Fill::F32 {
                middle: 0.25,
                half: 0.75,
                zeros_from: config.linear_attn_config.num_heads as u64,
            },
            (Dtype::F32, "dt_bias") => f32(-2.0, 3.0),
            (Dtype::F32, "e_score_correction_bias") => f32(0.0, 0.25),
            (Dtype::F32, "o_norm") => f32(1.0, 0.2),
            (Dtype::F32, _) => f32(0.0, 0.9),
            (_, "embed_tokens") => Fill::Bf16 { middle: 0.0, half: 1.0 },
            _ if tensor.shape.dims().len() == 1 => Fill::Bf16 { middle: 1.0, half: 0.2 },
            (_, last) => {
                let columns: u64 = tensor.shape.dims().iter().skip(1).product();
                let half = gain(last) * (3.0 / columns.max(1) as f32).sqrt();
                Fill::Bf16 { middle: 0.0, half }
            }
        }
    }

    /// Writes the bytes of a tensor from `offset`, a multiple of eight, on. `key` is [`tensor_key`].
    pub(crate) fn write(self, key: u64, offset: u64, bytes: &mut [u8]) {
        let first = offset / 8;
        for (n, word) in (first..).zip(bytes.chunks_mut(8)) {
            let random = splitmix64(key, n);
            let filled = match self {
                Fill::Codes => random.to_le_bytes(),
                Fill::Scales { low } => random
                    .to_le_bytes()
                    .map(|byte| low + ((u16::from(byte) * 3) >> 8) as u8),
                Fill::Bf16 { middle, half } => bf16_word(random, middle, half),
                Fill::F32 {
                    middle,
                    half,
                    zeros_from,
                } => f32_word(random, middle, half, zeros_from, 2 * n),
            };
            word.copy_from_slice(&filled[..word.len()]);
        }
    }
}

/// Where the generator of a tensor starts.
pub(crate) fn tensor_key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed ^ GAMMA), |key, byte| {
        mix(key ^ u64::from(byte)).wrapping_add(GAMMA)
    })
}

/// Gain of a BF16 matrix by the last word of its name.
fn gain(last: &str) -> f32 {
    match last {
        "self_attention_res_proj" | "mlp_res_proj" | "output_attn_res_proj" => 1.5,
        "gate" => 1.2,
        "b_proj" | "g_proj" => 1.5,
        "gate_proj" | "up_proj" | "lm_head" => 2.0,
        "o_proj" | "down_proj" | "routed_expert_up_proj" => 0.5,
        _ => 1.0,
    }
}

/// The lowest of three neighbouring scale bytes that give random codes the variance gain^2 / columns.
fn scale_low(gain: f64, columns: u64) -> u8 {
    let factor = gain / (columns as f64).sqrt() / (E2M1_RMS * THREE_SCALES_RMS);
    (126.0 + factor.log2().round()).clamp(1.0, 250.0) as u8
}

/// A number of `bits` bits as one in [-1, 1).
fn unit(number: u64, bits: u32) -> f32 {
    number as f32 / (1u64 << (bits - 1)) as f32 - 1.0
}

fn bf16_word(random: u64, middle: f32, half: f32) -> [u8; 8] {
    let mut word = [0; 8];
    for (lane, bytes) in word.chunks_exact_mut(2).enumerate() {
        let value = middle + half * unit((random >> (16 * lane)) & 0xFFFF, 16);
        bytes.copy_from_slice(&bf16_bits(value).to_le_bytes());
    }
    word
}

fn f32_word(random: u64, middle: f32, half: f32, zeros_from: u64, first: u64) -> [u8; 8] {
    let mut word = [0; 8];
    for (lane, bytes) in word.chunks_exact_mut(4).enumerate() {
        let random = middle + half * unit((random >> (32 * lane + 8)) & 0xFF_FFFF, 24);
        let value = if first + lane as u64 >= zeros_from { 0.0 } else { random };
        bytes.copy_from_slice(&value.to_le_bytes());
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs for seed 0, from the generator's published test values.
    #[test]
    fn the_generator_is_splitmix64() {
        assert_eq!(splitmix64(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(0, 1), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(splitmix64(0, 2), 0x06C4_5D18_8009_454F);
    }

    #[test]
    fn rounding_to_bf16_is_to_the_nearest_even() {
        for (value, bits) in [
            (1.0, 0x3F80),
            (-2.5, 0xC020),
            (1.0 + 1.0 / 256.0, 0x3F80),
            (1.0 + 3.0 / 256.0, 0x3F82),
        ] {
            assert_eq!(bf16_bits(value), bits, "{value}");
        }
    }

    #[test]
    fn a_piece_is_the_same_however_it_is_cut() {
        let fills = [
            Fill::Codes,
            Fill::Scales { low: 119 },
            Fill::Bf16 { middle: 0.0, half: 1.0 },
            Fill::F32 {
                middle: 1.0,
                half: 0.5,
                zeros_from: 5,
            },
        ];
        for fill in fills {
            let (mut whole, mut pieces) = (vec![0; 44], vec![0; 44]);
            fill.write(7, 0, &mut whole);
            fill.write(7, 16, &mut pieces[16..]);
            fill.write(7, 0, &mut pieces[..16]);
            assert_eq!(whole, pieces);
        }
    }

    #[test]
    fn values_lie_where_the_fill_says() {
        let mut bytes = vec![0; 4096];
        Fill::Scales { low: 119 }.write(1, 0, &mut bytes);
        let count = |byte| bytes.iter().filter(|&&b| b == byte).count();
        assert_eq!(count(119) + count(120) + count(121), bytes.len());
        assert!([119, 120, 121].iter().all(|&byte| count(byte) > 1200));

        Fill::F32 {
            middle: -2.0,
            half: 3.0,
            zeros_from: 100,
        }
        .write(1, 0, &mut bytes);
        let numbers: Vec<f32> = bytes
            .as_chunks()
            .0
            .iter()
            .map(|&word| f32::from_le_bytes(word))
            .collect();
        assert!(numbers[..100].iter().all(|x| (-5.0..1.0).contains(x)));
        assert!(numbers[100..].iter().all(|&x| x == 0.0));

        Fill::Bf16 { middle: 0.0, half: 1.0 }.write(1, 0, &mut bytes);
        let value = |word: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16);
        let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(value).collect();
        let mean_square = numbers.iter().map(|x| x * x).sum::<f32>() / numbers.len() as f32;
        assert!((mean_square - 1.0 / 3.0).abs() < 0.02, "{mean_square}");
    }

    #[test]
    fn scales_give_experts_their_gain() {
        assert_eq!(scale_low(1.0, 1024), 119);
        assert_eq!(scale_low(2.0, 3584), 119);
        assert_eq!(scale_low(1.0, 1 << 60), 94);
    }
}
