//! exp, tanh and sigmoid as polynomials of our own, so that they give the same bits on every machine.
//!
//! Only additions, multiplications, fused multiply-adds, divisions, comparisons and integer shifts are used, each of
//! which IEEE 754 defines to the bit. The coefficients are minimax fits of the relative error (Remez), rounded to f32.

/// Adding and subtracting 1.5 * 2^23 rounds an f32 of small magnitude to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;
/// Below this `exp` rounds to zero.
const EXP_LOW: f32 = -104.0;
/// Above this `exp` is infinite.
const EXP_HIGH: f32 = 89.0;
const LOG2_E: f32 = std::f32::consts::LOG2_E;
const LN2_HIGH: f32 = std::f32::consts::LN_2;
/// ln 2 less its f32 value.
const LN2_LOW: f32 = -1.904_654_3e-9;

/// e^x. Within 1 ulp of the exact value where the result is a normal number, correctly flushed towards zero through the
/// subnormals, 0 below -104, infinite above 88.73. NaN gives NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons rather than f32::max: a NaN must stay a NaN.
    let c = if x < EXP_LOW { EXP_LOW } else { x };
    let c = if c > EXP_HIGH { EXP_HIGH } else { c };
    let shifted = c.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, c);
    let r = n.mul_add(-LN2_LOW, r);
    let q = 0.001_381_454_f32;
    let q = q.mul_add(r, 0.008_368_745);
    let q = q.mul_add(r, 0.041_668_39);
    let q = q.mul_add(r, 0.166_665_21);
    let q = q.mul_add(r, 0.499_999_94);
    let p = (q * r).mul_add(r, r) + 1.0;
    // 2^n in two factors, because n reaches -150 and 128 while a normal exponent ends at -126 and 127.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2^n for -126 <= n <= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent: an odd polynomial below 0.625, `1 - 2 / (e^2|x| + 1)` with the sign of x from there on.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = -0.005_704_987_3_f32;
    let p = p.mul_add(z, 0.020_639_088);
    let p = p.mul_add(z, -0.053_739_715);
    let p = p.mul_add(z, 0.133_314_42);
    let p = p.mul_add(z, -0.333_332_8);
    let small = (p * z).mul_add(x, x);
    let large = 1.0 - 2.0 / (exp(a + a) + 1.0);
    (if a < 0.625 { small } else { large }).copysign(x)
}

/// x * sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// SiTU-GLU: `[b tanh(g/b) sigmoid(g)] * [c tanh(u/c)]`, both factors softly bounded (Kimi K3 report). The sigmoid takes
/// the uncapped gate.
#[inline(always)]
pub fn situ(gate: f32, up: f32, beta: f32, linear_beta: f32) -> f32 {
    (beta * tanh(gate / beta) * sigmoid(gate)) * (linear_beta * tanh(up / linear_beta))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        let spacing = (f32::from_bits(rounded.abs().to_bits() + 1) - rounded.abs()) as f64;
        (got as f64 - exact).abs() / spacing
    }

    fn sweep(low: f32, high: f32, mut f: impl FnMut(f32)) {
        const STEPS: u32 = 200_003;
        for i in 0..=STEPS {
            f(low + (high - low) * (i as f32 / STEPS as f32));
        }
    }

    #[test]
    fn exp_is_within_one_ulp() {
        sweep(-87.3, 88.7, |x| {
            assert!(ulps(exp(x), (x as f64).exp()) <= 1.0, "exp({x}) = {}", exp(x))
        });
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(200.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        sweep(-104.5, -87.3, |x| {
            let exact = (x as f64).exp();
            assert!(
                (exp(x) as f64 - exact).abs() <= 2.0_f64.powi(-149),
                "exp({x}) = {:e}, exact {exact:e}",
                exp(x)
            );
        });
        assert!(exp(-100.0) > 0.0, "subnormals are kept");
    }

    #[test]
    fn tanh_and_sigmoid_are_within_three_ulps() {
        sweep(-12.0, 12.0, |x| {
            assert!(ulps(tanh(x), (x as f64).tanh()) <= 2.0, "tanh({x}) = {}", tanh(x));
            let s = 1.0 / (1.0 + (-(x as f64)).exp());
            assert!(ulps(sigmoid(x), s) <= 3.0, "sigmoid({x}) = {}", sigmoid(x));
        });
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(tanh(-1000.0), -1.0);
        assert_eq!(tanh(-0.0).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(sigmoid(-1000.0), 0.0);
        assert_eq!(sigmoid(1000.0), 1.0);
        assert!(tanh(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan());
    }

    #[test]
    fn situ_is_capped() {
        let v = situ(1000.0, 1000.0, 4.0, 25.0);
        assert!((v - 100.0).abs() < 1e-4, "{v}");
        let (g, u) = (3.0_f64, -7.0_f64);
        let exact = 4.0 * (g / 4.0).tanh() / (1.0 + (-g).exp()) * 25.0 * (u / 25.0).tanh();
        assert!((situ(3.0, -7.0, 4.0, 25.0) as f64 - exact).abs() < 1e-5);
    }
}
