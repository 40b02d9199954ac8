//! `anabranch verify`: packs against their checksums.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use drives::{Notices, PACK_SUFFIX, verify_pack};
use engine::human;

use crate::error::Error;
use crate::output::{self, Meter, grouped};
use crate::settings::Verify;
use crate::signals::Interrupt;

/// Damaged chunks that are shown for a pack.
const SHOWN: usize = 10;

pub fn verify(settings: &Verify, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    let packs = find_packs(&settings.packs)?;
    let notices = Notices::default();
    let (mut bytes, mut damaged) = (0, 0);
    for pack in &packs {
        let start = Instant::now();
        let mut meter = Meter::new();
        let report = verify_pack(pack, &notices, &mut |at| {
            meter.show(|| {
                let left = output::time_left(start, at.bytes, at.total);
                format!("{}: {} of {}{left}", pack.display(), human(at.bytes), human(at.total))
            });
            match interrupt.cancel().is_cancelled() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        meter.clear();
        let report = match report {
            Ok(report) => report,
            Err(error) if interrupt.cancel().is_cancelled() => return Err(error.into()),
            // A pack that cannot even be read is one of the damaged: the others are still of interest.
            Err(error) => {
                output::say(error);
                damaged += 1;
                continue;
            }
        };
        bytes += report.bytes;
        damaged += usize::from(!report.bad.is_empty());
        for bad in report.bad.iter().take(SHOWN) {
            output::say(format_args!(
                "{}: expert {}, {} bytes at offset {}: {}",
                pack.display(),
                bad.expert,
                bad.len,
                bad.offset,
                bad.reason
            ));
        }
        if report.bad.len() > SHOWN {
            output::say(format_args!(
                "{}: and {} chunks more",
                pack.display(),
                report.bad.len() - SHOWN
            ));
        }
    }
    for notice in notices.take() {
        output::note(notice);
    }
    if damaged > 0 {
        return Err(Error::DamagedPacks {
            damaged,
            of: packs.len(),
        });
    }
    output::say(format_args!(
        "{} packs with {} bytes of experts are as they were written",
        packs.len(),
        grouped(bytes)
    ));
    Ok(())
}

/// The packs that paths name; those of a folder by name.
fn find_packs(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let mut packs = Vec::new();
    for path in paths {
        if !path.is_dir() {
            packs.push(path.clone());
            continue;
        }
        let entries = path
            .read_dir()
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        let mut found: Vec<PathBuf> = entries.map_err(|source| Error::file(path, "list", source))?;
        found.retain(|file| file.to_string_lossy().ends_with(PACK_SUFFIX));
        if found.is_empty() {
            return Err(Error::NoPack { path: path.clone() });
        }
        found.sort();
        packs.extend(found);
    }
    Ok(packs)
}
