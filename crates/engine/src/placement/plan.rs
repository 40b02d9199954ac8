//! Plans: which ranges of which experts shall be on which drive.

use super::PlacementError;
use checkpoint::{Checkpoint, ExpertPlace};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Most lines of a plan file: a line for each layer of ten drives takes a thousand.
const MAX_LINES: usize = 1_000_000;
/// Longest line of a plan file in bytes. A list of 896 experts takes 3,500.
const MAX_LINE_BYTES: usize = 1 << 16;

/// A plan: its lines in any order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PlacePlan {
    /// What shall be placed.
    pub lines: Vec<PlanLine>,
}

/// One line of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanLine {
    /// The folder that the pack goes to; it exists.
    pub drive: PathBuf,
    /// The layer.
    pub layer: u32,
    /// The experts of it.
    pub experts: ExpertSet,
    /// Which part of each of them.
    pub part: Part,
}

/// Some experts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertSet {
    /// All there are.
    All,
    /// Numbers from the first to the last of each pair, both included.
    Listed(Vec<(u32, u32)>),
}

/// A part of an expert. Borders move to the nearest border of a checksum chunk when it is placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Part {
    /// All bytes.
    Whole,
    /// From and to, as fractions of the expert's bytes.
    Share(f64, f64),
    /// From and to, in bytes.
    Bytes(u64, u64),
}

/// A line as it stands in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    drive: PathBuf,
    layer: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<(f64, f64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<(u64, u64)>,
}

impl ExpertSet {
    /// The numbers in `numbers`, in any order, as few ranges.
    pub fn of(numbers: &[u32]) -> Self {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for number in sorted {
            match ranges.last_mut() {
                Some((_, last)) if number <= last.saturating_add(1) => *last = number,
                _ => ranges.push((number, number)),
            }
        }
        Self::Listed(ranges)
    }

    /// The numbers, below `count`; the first number beyond it otherwise.
    pub(super) fn numbers(&self, count: u32) -> Result<Vec<u32>, u32> {
        match self {
            Self::All => Ok((0..count).collect()),
            Self::Listed(ranges) => match ranges.iter().find(|(_, last)| *last >= count) {
                Some(&(first, _)) => Err(first.max(count)),
                None => Ok(ranges.iter().flat_map(|&(first, last)| first..=last).collect()),
            },
        }
    }
}

impl FromStr for ExpertSet {
    type Err = String;

    /// Numbers and ranges with commas between them, as in `0-15,40`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("{text:?}"));
        let ranges = text.split(',').map(|item| {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let (first, last) = (number(first)?, number(last)?);
            (first <= last)
                .then_some((first, last))
                .ok_or_else(|| format!("{item:?}"))
        });
        Ok(Self::Listed(ranges.collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for ExpertSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Listed(ranges) = self else {
            return f.write_str("all");
        };
        for (place, (first, last)) in ranges.iter().enumerate() {
            let comma = if place == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl PlacePlan {
    /// Reads a plan file (`docs/layout.md`). Relative folders start at the file's own.
    ///
    /// # Errors
    ///
    /// [`PlacementError::Io`], and [`PlacementError::Plan`] with the number of the line.
    pub fn read(path: &Path) -> Result<Self, PlacementError> {
        let failed = |error: std::io::Error| PlacementError::io(path, "read", &error);
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let base = path.parent().unwrap_or(Path::new(""));
        let mut plan = Self::default();
        let mut text = Vec::new();
        for number in 1.. {
            text.clear();
            let limit = MAX_LINE_BYTES as u64 + 1;
            let count = std::io::Read::take(&mut file, limit)
                .read_until(b'\n', &mut text)
                .map_err(failed)?;
            let wrong = |found: String, expected: &str| PlacementError::Plan {
                path: path.to_path_buf(),
                where_: format!("line {number}"),
                found,
                expected: expected.to_owned(),
            };
            if count == 0 {
                break;
            }
            if count > MAX_LINE_BYTES || number > MAX_LINES {
                let expected = format!("at most {MAX_LINES} lines of at most {MAX_LINE_BYTES} bytes");
                return Err(wrong("more".into(), &expected));
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            let line: Line = serde_json::from_slice(&text).map_err(|error| {
                wrong(
                    format!("text that does not parse ({error})"),
                    "an object with drive and layer",
                )
            })?;
            plan.lines
                .push(line.check(base).map_err(|(found, expected)| wrong(found, expected))?);
        }
        if plan.lines.is_empty() {
            return Err(PlacementError::Plan {
                path: path.to_path_buf(),
                where_: "line 1".into(),
                found: "no line".into(),
                expected: "at least one".into(),
            });
        }
        Ok(plan)
    }

    /// The plan as the text of a file.
    pub fn to_json_lines(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            let line = Line {
                drive: line.drive.clone(),
                layer: line.layer,
                experts: (line.experts != ExpertSet::All).then(|| line.experts.to_string()),
                share: match line.part {
                    Part::Share(from, to) => Some((from, to)),
                    _ => None,
                },
                bytes: match line.part {
                    Part::Bytes(from, to) => Some((from, to)),
                    _ => None,
                },
            };
            // Only a path that is not UTF-8 has no JSON; such a line is left out of no plan that was read from a file.
            text.push_str(&serde_json::to_string(&line).unwrap_or_default());
            text.push('\n');
        }
        text
    }

    /// A copy of every expert on each drive.
    pub fn mirror(checkpoint: &Checkpoint, drives: &[PathBuf]) -> Self {
        Self::by_layer(checkpoint, drives, |_, _| (ExpertSet::All, Part::Whole))
    }

    /// On each drive a share of the experts of each layer, whole, the first ones of `order(layer)` first. A share of 1 is all of them.
    pub fn weighted(checkpoint: &Checkpoint, shares: &[(PathBuf, f64)], order: &dyn Fn(u32) -> Vec<u32>) -> Self {
        let drives: Vec<PathBuf> = shares.iter().map(|(drive, _)| drive.clone()).collect();
        Self::by_layer(checkpoint, &drives, |drive, layer| {
            let order = order(layer);
            let count = (order.len() as f64 * shares[drive].1.clamp(0.0, 1.0)).round() as usize;
            (ExpertSet::of(&order[..count]), Part::Whole)
        })
    }

    /// One copy in all: of every expert each drive holds a part as large as its speed is among the speeds.
    pub fn split(checkpoint: &Checkpoint, speeds: &[(PathBuf, f64)]) -> Self {
        let drives: Vec<PathBuf> = speeds.iter().map(|(drive, _)| drive.clone()).collect();
        let sum: f64 = speeds.iter().map(|(_, speed)| speed).sum();
        let mut borders = vec![0.0];
        let mut reached = 0.0;
        for (_, speed) in speeds {
            reached += speed;
            borders.push((reached / sum).min(1.0));
        }
        if let Some(last) = borders.last_mut() {
            *last = 1.0;
        }
        Self::by_layer(checkpoint, &drives, |drive, _| {
            (ExpertSet::All, Part::Share(borders[drive], borders[drive + 1]))
        })
    }

    fn by_layer(checkpoint: &Checkpoint, drives: &[PathBuf], choose: impl Fn(usize, u32) -> (ExpertSet, Part)) -> Self {
        let config = checkpoint.config();
        let layers: Vec<usize> = (0..config.num_hidden_layers)
            .filter(|&layer| config.is_moe(layer))
            .collect();
        let mut lines = Vec::new();
        for (number, drive) in drives.iter().enumerate() {
            for &layer in &layers {
                let (experts, part) = choose(number, layer as u32);
                let empty =
                    experts == ExpertSet::Listed(Vec::new()) || matches!(part, Part::Share(from, to) if from >= to);
                if !empty {
                    lines.push(PlanLine {
                        drive: drive.clone(),
                        layer: layer as u32,
                        experts,
                        part,
                    });
                }
            }
        }
        Self { lines }
    }
}

impl Line {
    /// The line, or what was found and expected.
    fn check(self, base: &Path) -> Result<PlanLine, (String, &'static str)> {
        let experts = match &self.experts {
            None => ExpertSet::All,
            Some(text) => text
                .parse()
                .map_err(|found| (found, "numbers and ranges such as 0-15,40"))?,
        };
        let part = match (self.share, self.bytes) {
            (None, None) => Part::Whole,
            (Some((from, to)), None) if 0.0 <= from && from < to && to <= 1.0 => Part::Share(from, to),
            (Some((from, to)), None) => return Err((format!("share {from}, {to}"), "0 <= from < to <= 1")),
            (None, Some((from, to))) if from < to => Part::Bytes(from, to),
            (None, Some((from, to))) => return Err((format!("bytes {from}, {to}"), "from < to")),
            (Some(_), Some(_)) => return Err(("share and bytes".into(), "one of them")),
        };
        Ok(PlanLine {
            drive: base.join(self.drive),
            layer: self.layer,
            experts,
            part,
        })
    }
}

impl Part {
    /// The part of an expert that is placed: for each extent a range of its bytes, possibly empty. `None` when the expert ends before
    /// the part does.
    pub(super) fn ranges(self, expert: &ExpertPlace, chunk_bytes: u32) -> Option<Vec<Range<u64>>> {
        let total = expert.bytes();
        let (from, to) = match self {
            Self::Whole => (0, total),
            Self::Share(from, to) => ((from * total as f64).round() as u64, (to * total as f64).round() as u64),
            Self::Bytes(from, to) => (from, to),
        };
        if to > total {
            return None;
        }
        let (from, to) = (border(expert, from, chunk_bytes), border(expert, to, chunk_bytes));
        let mut start = 0;
        let ranges = expert.extents().iter().map(|extent| {
            let inside = |byte: u64| byte.saturating_sub(start).min(extent.len);
            let range = inside(from)..inside(to);
            start += extent.len;
            range
        });
        Some(ranges.collect())
    }
}

/// The border of a checksum chunk that is nearest to byte `byte` of an expert: an end of an extent, or a multiple of the chunk size from the
/// page in which the extent begins.
fn border(expert: &ExpertPlace, byte: u64, chunk_bytes: u32) -> u64 {
    let page = drives::PAGE_BYTES as u64;
    // Smaller chunks are refused when a pack is made.
    let chunk = u64::from(chunk_bytes).max(page);
    let mut start = 0;
    for extent in expert.extents() {
        if byte <= start + extent.len {
            let (inside, skip) = (byte - start, extent.offset % page);
            let below = (skip + inside) / chunk * chunk;
            let in_extent = |place: u64| place.saturating_sub(skip).min(extent.len);
            let (low, high) = (in_extent(below), in_extent(below + chunk));
            let nearest = if inside - low <= high - inside { low } else { high };
            return start + nearest;
        }
        start += extent.len;
    }
    start
}
