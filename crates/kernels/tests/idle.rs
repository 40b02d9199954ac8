//! Compute threads that wait cost next to nothing. Alone in its process, whose time is counted.

mod processor_time;

use kernels::{Backend, Cpu, Isa};
use processor_time::processor_time;
use std::time::Duration;

const IDLE: Duration = Duration::from_millis(500);
/// Of one processor.
const MOST: f64 = 0.02;
/// Until the threads have given up waiting for more.
const SPIN: Duration = Duration::from_millis(20);

#[test]
fn an_idle_pool_sleeps() {
    let cpu = Cpu::new(Isa::detect(), 4).unwrap();
    let mut x = cpu.act(64, 1024);
    cpu.upload_bf16(&vec![0; 2 * 64 * 1024], &mut x);
    cpu.sigmoid(&mut x);
    std::thread::sleep(SPIN);
    let Some(before) = processor_time() else {
        println!("skipped: /proc does not count processor time here");
        return;
    };
    std::thread::sleep(IDLE);
    let used = processor_time().unwrap() - before;
    assert!(used.as_secs_f64() < MOST * IDLE.as_secs_f64(), "{used:?} of {IDLE:?}");
    // Work counts: else the test could not fail.
    let before = processor_time().unwrap();
    (0..200).for_each(|_| cpu.sigmoid(&mut x));
    assert!(processor_time().unwrap() > before);
}
