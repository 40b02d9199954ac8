//! The decision alone, without a streamer.

use super::*;
use crate::layout::{Extent, Home, LayoutBuilder};
use crate::pace::Pace;
use proptest::prelude::*;

const PAGE: usize = crate::PAGE_BYTES;

fn id(expert: usize) -> ExpertId {
    ExpertId {
        layer: 0,
        expert: expert as u32,
    }
}

/// Experts of so many pages on these drives.
fn layout(experts: &[(usize, Vec<usize>)], drives: usize) -> Layout {
    let mut builder = LayoutBuilder::new();
    let files: Vec<FileId> = (0..drives)
        .map(|drive| {
            let drive = builder.virtual_drive(&drive.to_string());
            builder.virtual_file(drive, "f", 1 << 30)
        })
        .collect();
    for (expert, (pages, holders)) in experts.iter().enumerate() {
        let len = (pages * PAGE) as u64;
        builder.shape(id(expert), &[Extent { page_offset: 0, len }]).unwrap();
        for &drive in holders {
            let home = Home {
                file: files[drive],
                offset: (expert * 100 * PAGE) as u64,
                start: 0,
                len,
            };
            builder.home(id(expert), 0, home).unwrap();
        }
    }
    builder.build().unwrap()
}

fn outlook(rates: &[u64]) -> Outlook {
    let mut outlook = Outlook::default();
    let paces: Vec<Pace> = rates.iter().map(|&rate| Pace::new(Some(rate))).collect();
    outlook.look(&paces, 0);
    outlook
}

fn ask<'a>(layout: &'a Layout, outlook: &'a Outlook, drive: usize, free_slots: usize) -> Ask<'a> {
    Ask {
        layout,
        outlook,
        drive: DriveId::at(drive),
        out: DriveSet::default(),
        free_slots,
        chunk: 4 * PAGE,
        hint_chunk: 0,
        floor: PAGE,
    }
}

fn read(decision: Decision) -> Pull {
    match decision {
        Decision::Read(pull) => pull,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_start_needs_a_slot_and_pieces_come_in_order() {
    let layout = layout(&[(6, vec![0]), (1, vec![0])], 1);
    let outlook = outlook(&[1_000_000_000]);
    let mut schedule = Schedule::default();
    schedule.open(BarrierId(0), ReadClass::Demand);
    schedule.push(&layout, JobId(0), BarrierId(0), id(0));
    schedule.push(&layout, JobId(1), BarrierId(0), id(1));
    assert_eq!(schedule.pull(&ask(&layout, &outlook, 0, 0)), Decision::Nothing);
    assert_eq!(schedule.unstarted(), 2);
    let first = read(schedule.pull(&ask(&layout, &outlook, 0, 1)));
    assert!(first.starts && first.offset == 0 && first.job == JobId(0) && first.piece.len == 4 * PAGE);
    let second = read(schedule.pull(&ask(&layout, &outlook, 0, 0)));
    assert!(!second.starts && second.offset == 4 * PAGE as u64 && second.job == JobId(0));
    assert_eq!(schedule.pull(&ask(&layout, &outlook, 0, 0)), Decision::Nothing);
    assert_eq!(read(schedule.pull(&ask(&layout, &outlook, 0, 1))).job, JobId(1));
    assert_eq!(schedule.pull(&ask(&layout, &outlook, 0, 1)), Decision::Nothing);
}

#[test]
fn a_failed_piece_comes_first_and_not_from_the_same_file() {
    let layout = layout(&[(2, vec![0, 1]), (2, vec![0, 1])], 2);
    let outlook = outlook(&[1_000_000_000; 2]);
    let mut schedule = Schedule::default();
    schedule.open(BarrierId(0), ReadClass::Demand);
    for expert in 0..2 {
        schedule.push(&layout, JobId(expert), BarrierId(0), id(expert as usize));
    }
    let pull = read(schedule.pull(&ask(&layout, &outlook, 0, 2)));
    assert!(schedule.put_back(&layout, pull.job, pull.piece, vec![pull.file]));
    let again = read(schedule.pull(&ask(&layout, &outlook, 1, 2)));
    assert_eq!(
        (again.job, again.piece, again.tried),
        (pull.job, pull.piece, vec![pull.file])
    );
    let both = vec![pull.file, again.file];
    assert!(
        !schedule.put_back(&layout, pull.job, pull.piece, both),
        "no home is left"
    );
    schedule.forget(pull.job);
    assert!(
        !schedule.put_back(&layout, pull.job, pull.piece, Vec::new()),
        "nobody wants it"
    );
}

#[test]
fn a_drive_that_is_out_reads_what_it_alone_holds() {
    let layout = layout(&[(1, vec![0, 1]), (1, vec![0])], 2);
    let outlook = outlook(&[1_000_000_000; 2]);
    let mut schedule = Schedule::default();
    schedule.open(BarrierId(0), ReadClass::Demand);
    for expert in 0..2 {
        schedule.push(&layout, JobId(expert), BarrierId(0), id(expert as usize));
    }
    let out: DriveSet = [0].into_iter().collect();
    let pull = |schedule: &mut Schedule, drive| {
        schedule.pull(&Ask {
            out,
            ..ask(&layout, &outlook, drive, 2)
        })
    };
    assert_eq!(read(pull(&mut schedule, 0)).job, JobId(1));
    assert_eq!(pull(&mut schedule, 0), Decision::Nothing);
    assert!(!schedule.waits_on(DriveId::at(0), out) && schedule.waits_on(DriveId::at(0), DriveSet::default()));
    assert_eq!(read(pull(&mut schedule, 1)).job, JobId(0));
}

#[test]
fn cuts_leave_no_crumbs() {
    for (rest, target, expected) in [(10, 4, 4), (4, 4, 4), (3, 4, 3), (5, 4, 2), (6, 4, 4), (4, 3, 4)] {
        let found = cut(rest * PAGE, target * PAGE, 4 * PAGE, 4 * PAGE);
        assert_eq!(found, expected * PAGE, "{target} of {rest}");
    }
}

proptest! {
    /// Whatever drives hold and however fast they are, idle drives never leave everything to each other, each byte is pulled
    /// once, and only by a drive that holds it.
    #[test]
    fn something_is_always_read(
        experts in prop::collection::vec((1usize..30, 1usize..32), 1..12),
        rates in prop::collection::vec(1u64..1_000_000, 5),
        busy in prop::collection::vec(0u64..50_000_000, 5),
    ) {
        let experts: Vec<(usize, Vec<usize>)> = experts
            .into_iter()
            .map(|(pages, bits)| (pages, (0..5).filter(|drive| bits >> drive & 1 == 1).collect()))
            .collect();
        let layout = layout(&experts, 5);
        let mut schedule = Schedule::default();
        schedule.open(BarrierId(0), ReadClass::Demand);
        for expert in 0..experts.len() {
            schedule.push(&layout, JobId(expert as u64), BarrierId(0), id(expert));
        }
        // Drives that read something already; they pull nothing in the first round.
        let mut paces: Vec<Pace> = rates.iter().map(|&rate| Pace::new(Some(rate * 10_000))).collect();
        for (pace, &bytes) in paces.iter_mut().zip(&busy) {
            pace.issue(bytes, 0);
        }
        let mut pulled = vec![0; experts.len()];
        let mut outlook = Outlook::default();
        outlook.look(&paces, 0);
        loop {
            let before: usize = pulled.iter().sum();
            for drive in 0..5 {
                if let Decision::Read(pull) = schedule.pull(&ask(&layout, &outlook, drive, 99)) {
                    let expert = pull.job.0 as usize;
                    prop_assert!(experts[expert].1.contains(&drive));
                    prop_assert_eq!(pull.piece.slot_start, pulled[expert]);
                    prop_assert!(pull.piece.len <= 4 * PAGE);
                    pulled[expert] += pull.piece.len;
                }
            }
            if pulled.iter().sum::<usize>() == before {
                break;
            }
        }
        let all: Vec<usize> = experts.iter().map(|(pages, _)| pages * PAGE).collect();
        prop_assert_eq!(pulled, all);
    }
}
