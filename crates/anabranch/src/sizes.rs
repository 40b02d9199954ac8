//! Sizes as people write them: `24GB`, `1.5GiB`, `512M`, plain bytes.

/// What [`parse`] takes, for messages.
const EXPECTED: &str = "a size such as 24GB (10^9 bytes), 24GiB or 24G (2^30 bytes), or a plain number of bytes";

/// Bytes of a size. `KB`, `MB`, `GB`, `TB` are powers of 1000; `KiB` ... `TiB` and the bare letters are powers of 1024. A
/// fraction of a byte is dropped.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("found {text:?}, expected {EXPECTED}");
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit_bytes(unit.trim_start()).ok_or_else(wrong)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return Err(wrong());
    }
    let too_large = || format!("found {text:?}, expected a size below 2^64 bytes");
    let whole: u64 = match whole {
        "" => 0,
        _ => whole.parse().map_err(|_| too_large())?,
    };
    let mut bytes = u128::from(whole) * u128::from(unit);
    // Digits beyond these are less than a byte of any unit.
    let fraction = &fraction[..fraction.len().min(15)];
    if !fraction.is_empty() {
        let numerator: u64 = fraction.parse().map_err(|_| wrong())?;
        bytes += u128::from(numerator) * u128::from(unit) / 10u128.pow(fraction.len() as u32);
    }
    u64::try_from(bytes).map_err(|_| too_large())
}

/// Bytes of a unit, in any case.
fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    let (letter, base) = match unit.as_str() {
        "" | "b" => return Some(1),
        _ if unit.len() == 1 => (unit.as_str(), 1024),
        _ => match (unit.strip_suffix("ib"), unit.strip_suffix('b')) {
            (Some(letter), _) => (letter, 1024),
            (None, Some(letter)) => (letter, 1000),
            (None, None) => return None,
        },
    };
    let power = ["k", "m", "g", "t"].iter().position(|&known| known == letter)?;
    Some(u64::pow(base, power as u32 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_what_they_say() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("24GB", 24_000_000_000),
            ("24GiB", 24 << 30),
            ("24G", 24 << 30),
            ("24 gib", 24 << 30),
            ("1.5GiB", 3 << 29),
            ("0.5k", 512),
            (".5K", 512),
            ("2.GB", 2_000_000_000),
            ("1.2345678TB", 1_234_567_800_000),
            ("3MB", 3_000_000),
            ("3M", 3 << 20),
            ("2TiB", 2 << 40),
            ("7KB", 7000),
            ("1.9", 1),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_what_was_found() {
        for text in [
            "",
            "GB",
            ".",
            "1..2",
            "1.2.3G",
            "-1",
            "+1",
            "1e9",
            "12XB",
            "12GBB",
            "ib",
            "1ib",
            "é",
            "1 2",
            "1gé",
            "99999999999999999999",
            "17000000TiB",
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains("found") && error.contains("expected"), "{error}");
        }
    }
}
