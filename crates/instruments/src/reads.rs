//! Read events as lines of a file, and as a trace that viewers show.

use std::collections::BTreeMap;
use std::io::{self, Write};

use drives::{ReadClass, ReadEvent};
use engine::TrunkFormat;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// One read of a drive, in the words of the file. Times are nanoseconds of one clock whose zero means nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadRecord {
    /// The drive's name: its first folder.
    pub drive: String,
    /// The layer, as in the tensor names.
    pub layer: u32,
    /// The expert, as in the tensor names.
    pub expert: u32,
    /// Which of the expert's extents.
    pub extent: u32,
    /// First byte of the read, counted from the extent's start.
    pub start: u64,
    /// Bytes of the expert.
    pub bytes: u64,
    /// Bytes of the whole pages that were read.
    pub device_bytes: u64,
    /// Whether a barrier waited for it when it was issued, or it was a guess.
    pub class: RecordClass,
    /// Number of the barrier or of the set of hints.
    pub barrier: u64,
    /// When the expert was asked for.
    pub asked_ns: u64,
    /// When the read was given to the system.
    pub issued_ns: u64,
    /// When it ended.
    pub landed_ns: u64,
    /// Whether all bytes arrived.
    pub ok: bool,
    /// The trunk that routed to it, where that is not as published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trunk: Option<String>,
}

/// Why something was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordClass {
    /// A barrier waited for it.
    Demand,
    /// A guess that a barrier would.
    Hint,
}

impl ReadRecord {
    /// The record of an event on the drive of this name, of a model with this trunk.
    pub fn new(event: &ReadEvent, drive: &str, trunk: TrunkFormat) -> Self {
        Self {
            drive: drive.to_owned(),
            layer: event.expert.layer,
            expert: event.expert.expert,
            extent: event.extent,
            start: event.start,
            bytes: event.bytes,
            device_bytes: event.device_bytes,
            class: match event.class {
                ReadClass::Demand => RecordClass::Demand,
                ReadClass::Hint => RecordClass::Hint,
            },
            barrier: event.barrier,
            asked_ns: event.asked_ns,
            issued_ns: event.issued_ns,
            landed_ns: event.landed_ns,
            ok: event.ok,
            trunk: (!trunk.is_exact()).then(|| trunk.label()),
        }
    }
}

/// Rows of one track: what overlaps is shown in different ones. Each holds the end of its last span.
#[derive(Default)]
struct Lanes(Vec<u64>);

impl Lanes {
    /// A row for a span. Spans come in the order of their ends.
    fn take(&mut self, begin: u64, end: u64) -> usize {
        let free = self.0.iter().position(|&last| last <= begin);
        let lane = free.unwrap_or_else(|| {
            self.0.push(0);
            self.0.len() - 1
        });
        self.0[lane] = self.0[lane].max(end);
        lane
    }
}

/// A barrier, as far as its reads tell.
#[derive(Clone, Copy)]
struct Span {
    layer: u32,
    asked_ns: u64,
    landed_ns: u64,
    device_bytes: u64,
    reads: u64,
}

/// Number of the track of barriers; drives come after it.
const BARRIERS: usize = 0;

/// Writes a trace in the JSON form that Perfetto and `chrome://tracing` read: a track of barriers, and one for each drive with a span
/// for each read. Gives the number of reads.
///
/// # Errors
///
/// Those of `records` and of `out`.
pub fn write_chrome_trace(
    records: impl Iterator<Item = io::Result<ReadRecord>>,
    out: &mut impl Write,
) -> io::Result<u64> {
    let mut drives: BTreeMap<String, (usize, Lanes)> = BTreeMap::new();
    let mut barriers: BTreeMap<u64, Span> = BTreeMap::new();
    let mut zero = None;
    let mut reads = 0;
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let name = |out: &mut dyn Write, track: usize, name: &str| {
        let event = json!({"ph": "M", "name": "process_name", "pid": track, "args": {"name": name}});
        write!(out, "{event}")
    };
    name(out, BARRIERS, "barriers")?;
    for record in records {
        let record = record?;
        // The first to land need not be the first that was asked for; a trace may begin before zero.
        let zero = *zero.get_or_insert(record.asked_ns);
        let next = drives.len() + BARRIERS + 1;
        if !drives.contains_key(&record.drive) {
            writeln!(out, ",")?;
            name(out, next, &record.drive)?;
        }
        let (track, lanes) = drives.entry(record.drive.clone()).or_insert((next, Lanes::default()));
        let lane = lanes.take(record.issued_ns, record.landed_ns);
        let mut event = json!({
            "ph": "X", "pid": *track, "tid": lane,
            "name": format!("{}/{}", record.layer, record.expert),
            "cat": record.class,
            "ts": micros(record.issued_ns, zero), "dur": micros(record.landed_ns, record.issued_ns),
            "args": {
                "barrier": record.barrier, "extent": record.extent, "start": record.start,
                "device_bytes": record.device_bytes, "waited_us": micros(record.issued_ns, record.asked_ns), "ok": record.ok,
            },
        });
        if let Some(trunk) = &record.trunk {
            event["args"]["trunk"] = trunk.as_str().into();
        }
        write!(out, ",\n{event}")?;
        if record.class == RecordClass::Demand {
            let span = barriers.entry(record.barrier).or_insert(Span {
                layer: record.layer,
                asked_ns: record.asked_ns,
                landed_ns: record.landed_ns,
                device_bytes: 0,
                reads: 0,
            });
            span.asked_ns = span.asked_ns.min(record.asked_ns);
            span.landed_ns = span.landed_ns.max(record.landed_ns);
            span.device_bytes += record.device_bytes;
            span.reads += 1;
        }
        reads += 1;
    }
    let mut spans: Vec<(u64, Span)> = barriers.into_iter().collect();
    spans.sort_by_key(|(_, span)| span.landed_ns);
    let mut lanes = Lanes::default();
    for (number, span) in spans {
        let zero = zero.unwrap_or_default();
        let event = json!({
            "ph": "X", "pid": BARRIERS, "tid": lanes.take(span.asked_ns, span.landed_ns),
            "name": format!("layer {}", span.layer),
            "ts": micros(span.asked_ns, zero), "dur": micros(span.landed_ns, span.asked_ns),
            "args": {"barrier": number, "reads": span.reads, "device_bytes": span.device_bytes},
        });
        write!(out, ",\n{event}")?;
    }
    writeln!(out, "]}}")?;
    Ok(reads)
}

/// Microseconds from one time to another.
fn micros(ns: u64, from_ns: u64) -> f64 {
    (ns as i128 - from_ns as i128) as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(drive: &str, barrier: u64, times: (u64, u64, u64)) -> ReadRecord {
        ReadRecord {
            drive: drive.into(),
            layer: 3,
            expert: 7,
            extent: 0,
            start: 4096,
            bytes: 5000,
            device_bytes: 8192,
            class: RecordClass::Demand,
            barrier,
            asked_ns: times.0,
            issued_ns: times.1,
            landed_ns: times.2,
            ok: true,
            trunk: None,
        }
    }

    #[test]
    fn a_line_is_the_documented_object() {
        let record = record("/mnt/a", 9, (1, 2, 3));
        let text = serde_json::to_string(&record).unwrap();
        let expected = json!({"drive": "/mnt/a", "layer": 3, "expert": 7, "extent": 0, "start": 4096, "bytes": 5000,
            "device_bytes": 8192, "class": "demand", "barrier": 9, "asked_ns": 1, "issued_ns": 2, "landed_ns": 3, "ok": true});
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), expected);
        assert_eq!(serde_json::from_str::<ReadRecord>(&text).unwrap(), record);
        let other = ReadRecord {
            trunk: Some(TrunkFormat::Int8.label()),
            ..record
        };
        let text = serde_json::to_string(&other).unwrap();
        assert!(text.contains(r#""trunk":"int8, not weight-exact""#), "{text}");
        assert_eq!(serde_json::from_str::<ReadRecord>(&text).unwrap(), other);
        let mut trace = Vec::new();
        write_chrome_trace([Ok(other)].into_iter(), &mut trace).unwrap();
        assert!(String::from_utf8(trace).unwrap().contains("not weight-exact"));
    }

    #[test]
    fn overlapping_reads_get_rows_of_their_own() {
        let records = [
            record("a", 0, (1000, 1000, 3000)),
            record("a", 0, (1000, 2000, 4000)),
            record("b", 0, (1000, 1500, 5000)),
            record("a", 1, (5000, 5000, 6000)),
        ];
        let mut out = Vec::new();
        let count = write_chrome_trace(records.into_iter().map(Ok), &mut out).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let spans = |track: u64| -> Vec<(u64, f64, f64)> {
            let of_track = |event: &&serde_json::Value| event["ph"] == "X" && event["pid"] == track;
            let span = |event: &serde_json::Value| {
                let number = |name: &str| event[name].as_f64().unwrap();
                (event["tid"].as_u64().unwrap(), number("ts"), number("dur"))
            };
            events.iter().filter(of_track).map(span).collect()
        };
        assert_eq!(count, 4);
        assert_eq!(spans(0), [(0, 0.0, 4.0), (0, 4.0, 1.0)]);
        assert_eq!(spans(1), [(0, 0.0, 2.0), (1, 1.0, 2.0), (0, 4.0, 1.0)]);
        assert_eq!(spans(2), [(0, 0.5, 3.5)]);
        let named = |track: u64, name: &str| {
            events
                .iter()
                .any(|event| event["ph"] == "M" && event["pid"] == track && event["args"]["name"] == name)
        };
        assert!(named(0, "barriers") && named(1, "a") && named(2, "b"));
    }

    #[test]
    fn a_trace_of_nothing_is_a_trace() {
        let mut out = Vec::new();
        assert_eq!(write_chrome_trace(std::iter::empty(), &mut out).unwrap(), 0);
        serde_json::from_slice::<serde_json::Value>(&out).unwrap();
    }
}
