//! Values of flags, from text; errors say what was found and expected.

use engine::{Isa, KvFormat, Reader, TrunkFormat};

fn number(text: &str, expected: &str, fits: impl Fn(f32) -> bool) -> Result<f32, String> {
    match text.parse() {
        Ok(value) if fits(value) => Ok(value),
        _ => Err(format!("found {text}, expected {expected}")),
    }
}

pub fn temperature(text: &str) -> Result<f32, String> {
    number(text, "a number from 0 up", |f| f >= 0.0 && f.is_finite())
}

pub fn top_p(text: &str) -> Result<f32, String> {
    number(text, "a number above 0 and up to 1", |f| f > 0.0 && f <= 1.0)
}

pub fn min_p(text: &str) -> Result<f32, String> {
    number(text, "a number from 0 to 1", |f| (0.0..=1.0).contains(&f))
}

pub fn epsilon(text: &str) -> Result<f32, String> {
    number(text, "a number above 0", |f| f > 0.0 && f.is_finite())
}

pub fn positive(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|&n| n > 0);
    number.ok_or_else(|| format!("found {text}, expected a whole number from 1 up"))
}

pub fn stop_text(text: &str) -> Result<String, String> {
    match text {
        "" => Err("found no text, expected at least one character".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

pub fn kv(text: &str) -> Result<KvFormat, String> {
    let found = KvFormat::ALL.into_iter().find(|format| format.name() == text);
    found.ok_or_else(|| format!("found {text}, expected f32 or bf16"))
}

pub fn reader(text: &str) -> Result<Reader, String> {
    let found = Reader::ALL.into_iter().find(|reader| reader.name() == text);
    found.ok_or_else(|| format!("found {text}, expected best or threads"))
}

pub fn isa(text: &str) -> Result<Isa, String> {
    let available = Isa::available();
    let found = available.iter().find(|isa| isa.to_string() == text);
    found.copied().ok_or_else(|| {
        let names: Vec<String> = available.iter().map(Isa::to_string).collect();
        format!(
            "found {text}, expected one that this processor runs: {}",
            names.join(", ")
        )
    })
}

pub fn trunk(text: &str) -> Result<TrunkFormat, String> {
    let found = TrunkFormat::ALL.into_iter().find(|format| format.name() == text);
    found.ok_or_else(|| format!("found {text}, expected bf16 or int8"))
}
