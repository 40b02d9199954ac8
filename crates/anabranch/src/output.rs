//! What goes to the screen: the answer to standard output, everything else to standard error.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use engine::Piece;

use crate::error::Error;

/// A line for the user on standard error. One that cannot be written has no other place to go.
pub fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A remark on something that stops nothing.
pub fn note(remark: impl std::fmt::Display) {
    say(format_args!("note: {remark}"));
}

/// Writes all of `text` to standard output.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(Error::Output)
}

/// Seconds in words, two units at most.
pub fn span(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    match whole {
        0..10 => format!("{seconds:.1} s"),
        10..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

/// Groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A share, or a dash where there is none.
pub fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}

/// How long the rest will take if it goes on as so far; nothing before there is anything to measure.
pub fn time_left(since: Instant, done: u64, of: u64) -> String {
    time_left_of_share(since, done as f64 / of as f64)
}

/// The same for a share of the work, from 0 to 1.
pub fn time_left_of_share(since: Instant, share: f64) -> String {
    if !(share > 0.0 && share < 1.0) {
        return String::new();
    }
    let seconds = since.elapsed().as_secs_f64() * (1.0 - share) / share;
    format!(", {} left", span(seconds))
}

/// A line on the terminal that says how far some work has come. Where standard error is no terminal, nothing.
pub struct Meter {
    on: bool,
    shown: Option<Instant>,
}

impl Meter {
    /// Between two updates.
    const PAUSE: Duration = Duration::from_millis(100);

    pub fn new() -> Self {
        Self {
            on: std::io::stderr().is_terminal(),
            shown: None,
        }
    }

    /// Shows a new state, unless the last one is very recent.
    pub fn show(&mut self, state: impl FnOnce() -> String) {
        if self.on && self.shown.is_none_or(|shown| shown.elapsed() >= Self::PAUSE) {
            let mut stderr = std::io::stderr();
            let _ = write!(stderr, "\r{}\x1b[K", state()).and_then(|()| stderr.flush());
            self.shown = Some(Instant::now());
        }
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if self.shown.take().is_some() {
            let mut stderr = std::io::stderr();
            let _ = write!(stderr, "\r\x1b[K").and_then(|()| stderr.flush());
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Shows an answer as it comes: its text on one stream, its reasoning on the other.
pub struct Screen<'a> {
    text: &'a mut dyn Write,
    side: &'a mut dyn Write,
    /// Whether `side` understands terminal codes.
    dim: bool,
    reasoning: bool,
    at_line_start: bool,
}

impl<'a> Screen<'a> {
    pub fn new(text: &'a mut dyn Write, side: &'a mut dyn Write, dim: bool) -> Self {
        Self {
            text,
            side,
            dim,
            reasoning: false,
            at_line_start: true,
        }
    }

    pub fn show(&mut self, piece: &Piece) -> Result<(), Error> {
        match piece {
            Piece::Reasoning(thought) => {
                if self.dim && !self.reasoning {
                    self.aside("\x1b[2m");
                }
                self.reasoning = true;
                self.aside(thought);
            }
            Piece::Text(text) => {
                self.end_reasoning();
                self.at_line_start = text.ends_with('\n');
                self.text
                    .write_all(text.as_bytes())
                    .and_then(|()| self.text.flush())
                    .map_err(Error::Output)?;
            }
        }
        Ok(())
    }

    /// Ends the last line of an answer.
    pub fn end(&mut self) -> Result<(), Error> {
        self.end_reasoning();
        if !std::mem::replace(&mut self.at_line_start, true) {
            self.text
                .write_all(b"\n")
                .and_then(|()| self.text.flush())
                .map_err(Error::Output)?;
        }
        Ok(())
    }

    /// Says something beside the answer.
    pub fn aside(&mut self, text: &str) {
        let _ = self.side.write_all(text.as_bytes()).and_then(|()| self.side.flush());
    }

    fn end_reasoning(&mut self) {
        if std::mem::take(&mut self.reasoning) {
            self.aside(if self.dim { "\x1b[0m\n" } else { "\n" });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_numbers_are_readable() {
        assert_eq!(span(0.04), "0.0 s");
        assert_eq!(span(9.44), "9.4 s");
        assert_eq!(span(59.4), "59 s");
        assert_eq!(span(250.0), "4 min 10 s");
        assert_eq!(span(7500.0), "2 h 5 min");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(497_220), "497,220");
        assert_eq!(grouped(17_547_264), "17,547,264");
    }

    #[test]
    fn reasoning_and_text_go_apart() {
        let (mut text, mut side) = (vec![], vec![]);
        let mut screen = Screen::new(&mut text, &mut side, false);
        for piece in [
            Piece::Reasoning("hm".into()),
            Piece::Reasoning("m".into()),
            Piece::Text("yes".into()),
        ] {
            screen.show(&piece).unwrap();
        }
        screen.end().unwrap();
        screen.end().unwrap();
        assert_eq!((text, side), (b"yes\n".to_vec(), b"hmm\n".to_vec()));
    }
}
