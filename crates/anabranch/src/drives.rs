//! `anabranch drives`: what folders are on, and how fast that is.

use drives::{DriveReport, Notices, describe};

use crate::error::Error;
use crate::output;
use crate::settings::Drives;
use crate::signals::Interrupt;

pub fn drives(settings: &Drives, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    let notices = Notices::default();
    let reports = describe(&settings.paths, &notices)?;
    for notice in notices.take() {
        output::note(notice);
    }
    if interrupt.cancel().is_cancelled() {
        return Err(Error::Interrupted);
    }
    match settings.json {
        true => {
            let text = serde_json::to_string_pretty(&reports).map_err(|e| Error::Output(e.into()))?;
            output::print(&(text + "\n"))
        }
        false => output::print(&table(&reports)),
    }
}

/// A paragraph for each drive, numbered from 1.
fn table(reports: &[DriveReport]) -> String {
    let mut text = String::new();
    for (place, report) in reports.iter().enumerate() {
        let folders: Vec<String> = report
            .folders
            .iter()
            .map(|folder| folder.display().to_string())
            .collect();
        text += &format!("{}. {}\n", place + 1, folders.join(", "));
        let mut row = |name: &str, value: String| text += &format!("   {name:<12} {value}\n");
        row("device", report.device.to_string());
        let system = report.file_system.as_deref().unwrap_or("unknown");
        let direct = match report.direct {
            Some(true) => "direct reads",
            Some(false) => "no direct reads: through the page cache",
            None => "direct reads not tried",
        };
        row("file system", format!("{system}, {direct}"));
        if let Some(bytes) = report.free_bytes {
            row("free", engine::human(bytes));
        }
        if let Some(speed) = &report.speed {
            let (alone, together) = (giga(speed.alone), giga(speed.together));
            row("speed", format!("{alone} GB/s alone, {together} GB/s with the others"));
            let (chunk, depth) = (engine::human(speed.chunk_bytes as u64), speed.depth);
            row("likes", format!("reads of {chunk}, {depth} at once"));
        }
        if !report.shares_with.is_empty() {
            let others: Vec<String> = report.shares_with.iter().map(|other| (other + 1).to_string()).collect();
            row("shares", format!("a bottleneck with drive {}", others.join(", ")));
        }
        if let Some(problem) = &report.problem {
            row("not measured", problem.clone());
        }
    }
    text
}

/// Bytes a second, in GB/s.
fn giga(rate: u64) -> String {
    format!("{:.2}", rate as f64 / 1e9)
}
