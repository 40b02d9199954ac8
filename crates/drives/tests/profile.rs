//! Drives measured on real files, remembered, and described.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use drives::{
    CHUNK_SIZES, DEPTHS, ExpertId, Layout, LayoutBuilder, MEASURE_BUDGET, Notice, Notices, Profile, Source, describe,
    report,
};

/// A shard of experts of `len` bytes, really written.
fn shard(folder: &Path, experts: u64, len: u64) -> Arc<Layout> {
    let path = folder.join("shard");
    let mut file = std::fs::File::create(&path).unwrap();
    let block: Vec<u8> = (0..len).map(|byte| (byte * 31 / 8) as u8).collect();
    for _ in 0..experts {
        file.write_all(&block).unwrap();
    }
    file.write_all(&[0; 100]).unwrap();
    file.sync_all().unwrap();
    let mut builder = LayoutBuilder::new();
    let file = builder.file(&path).unwrap();
    for expert in 0..experts {
        let source = Source {
            file,
            offset: 100 + expert * len,
            len,
        };
        let expert = expert as u32;
        builder.expert(ExpertId { layer: 0, expert }, &[source]).unwrap();
    }
    Arc::new(builder.build().unwrap())
}

/// Names, lengths and times of everything in a folder.
fn state(folder: &Path) -> BTreeMap<PathBuf, (u64, std::time::SystemTime)> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let found = entry.metadata().unwrap();
            (entry.path(), (found.len(), found.modified().unwrap()))
        })
        .collect()
}

#[test]
fn a_drive_is_measured_in_time_and_only_read() {
    let folder = tempfile::tempdir().unwrap();
    let layout = shard(folder.path(), 8, 5_000_000);
    let before = state(folder.path());
    let start = Instant::now();
    let profile = Profile::measure(&layout, &Notices::default()).unwrap();
    let took = start.elapsed();
    // A crowded machine is not in the budget; that it is kept otherwise is shown in virtual time, beside the search.
    assert!(took < 10 * MEASURE_BUDGET, "{took:?}");
    assert_eq!(state(folder.path()), before);
    let speed = profile.drives[0].speed.as_ref().unwrap();
    assert!(speed.alone > 1_000_000 && speed.alone < 1_000_000_000_000, "{speed:?}");
    assert!(CHUNK_SIZES.contains(&speed.chunk_bytes) && DEPTHS.contains(&speed.depth));
    assert!(profile.groups.is_empty() && profile.drives[0].problem.is_none());
    assert_eq!(profile.sum_together(), speed.together);
}

#[test]
fn a_profile_is_taken_from_its_file_until_that_is_spoilt() {
    let folder = tempfile::tempdir().unwrap();
    let layout = shard(folder.path(), 3, 1_000_000);
    let path = folder.path().join("drives.json");
    let notices = Notices::default();
    let load = || Profile::load_or_measure(&layout, &path, &notices).unwrap();
    let first = load();
    assert!(
        !notices
            .take()
            .iter()
            .any(|notice| matches!(notice, Notice::ProfileDropped { .. }))
    );
    assert_eq!(load(), first, "a second measuring would differ");

    std::fs::write(&path, "{").unwrap();
    let again = load();
    let told: Vec<String> = notices.take().iter().map(ToString::to_string).collect();
    assert!(
        told.iter()
            .any(|text| text.contains("drives.json: the remembered profile")),
        "{told:?}"
    );
    assert_eq!(load(), again, "the spoilt file was replaced");

    let nowhere = folder.path().join("none/drives.json");
    Profile::load_or_measure(&layout, &nowhere, &notices).unwrap();
    let kept = |notice: &Notice| matches!(notice, Notice::ProfileNotKept { .. });
    assert!(notices.take().iter().any(kept));
}

#[test]
fn a_drive_that_cannot_be_read_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let layout = shard(folder.path(), 3, 1_000_000);
    let file = std::fs::File::options()
        .write(true)
        .open(folder.path().join("shard"))
        .unwrap();
    file.set_len(100).unwrap();
    let profile = Profile::measure(&layout, &Notices::default()).unwrap();
    assert_eq!(profile.drives[0].speed, None);
    let problem = profile.drives[0].problem.as_ref().unwrap();
    assert!(problem.contains("end of file"), "{problem}");
}

#[test]
fn small_files_are_no_measure() {
    let folder = tempfile::tempdir().unwrap();
    let layout = shard(folder.path(), 3, 10_000);
    let profile = Profile::measure(&layout, &Notices::default()).unwrap();
    assert_eq!(profile.drives[0].speed, None);
    assert!(
        profile.drives[0]
            .problem
            .as_ref()
            .unwrap()
            .contains("no file of 512 KiB")
    );
    assert_eq!(profile.depths(), [drives::DEFAULT_DEPTH]);
}

#[test]
fn folders_are_described() {
    let folder = tempfile::tempdir().unwrap();
    let layout = shard(folder.path(), 4, 2_000_000);
    let (empty, gone) = (folder.path().join("empty"), folder.path().join("gone"));
    std::fs::create_dir(&empty).unwrap();
    let notices = Notices::default();

    let both = [folder.path().to_path_buf(), empty.clone()];
    let reports = describe(&both, &notices).unwrap();
    assert_eq!(reports.len(), 1, "one device is one drive");
    let one = &reports[0];
    assert_eq!(one.folders, both);
    assert!(one.speed.is_some() && one.problem.is_none() && one.direct.is_some());
    assert!(one.shares_with.is_empty());
    #[cfg(target_os = "linux")]
    assert!(one.file_system.is_some() && one.free_bytes.is_some());
    assert!(serde_json::to_string(&reports).unwrap().contains("\"chunk_bytes\":"));

    let of_layout = report(&layout, &Profile::measure(&layout, &notices).unwrap()).unwrap();
    assert_eq!((&of_layout[0].device, of_layout[0].direct), (&one.device, one.direct));

    let nothing = describe(&[empty], &notices).unwrap();
    assert!(nothing[0].speed.is_none());
    assert!(nothing[0].problem.as_ref().unwrap().starts_with("no file of 512 KiB"));
    let error = describe(std::slice::from_ref(&gone), &notices).unwrap_err().to_string();
    assert!(error.starts_with(&gone.display().to_string()), "{error}");
    assert!(describe(&[], &notices).unwrap().is_empty());
}
