use std::fs;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use super::end::END_LOGGED;
use super::log::{READ_MAX, SIZE_MAX};
use super::*;
use crate::cli::container::record::{self, sample};
use crate::sandbox::{Event, EventAction};

#[test]
fn a_log_that_has_grown_long_is_begun_anew_and_read_as_one() {
    let root = tempfile::tempdir().unwrap();
    let events = Events::of_root(root.path());
    let mut followed = Reader::new(&events).unwrap();
    let numbered = |number: u32| Event::now("c", EventAction::Exec).with("number", number);
    let mut count = 0;
    let mut seen = 0;
    while !events.old().exists() {
        events.append(&numbered(count).with("padding", "x".repeat(3000)));
        count += 1;
        if count % 50 == 0 {
            seen += followed.next().unwrap().len();
        }
    }
    events.append(&numbered(count));
    count += 1;
    assert!(events.log().metadata().unwrap().len() < SIZE_MAX);
    let read = Reader::new(&events).unwrap().next().unwrap();
    let numbers: Vec<String> = read
        .iter()
        .map(|event| event.attributes["number"].clone())
        .collect();
    let expected: Vec<String> = (0..count).map(|number| number.to_string()).collect();
    assert_eq!(numbers, expected);
    // A follower misses nothing.
    seen += followed.next().unwrap().len();
    assert_eq!(seen, usize::try_from(count).unwrap());
}

/// A process that broke out of its guest has the descriptor that its machine was given.
#[test]
fn a_machine_can_neither_read_the_log_nor_make_others_wait_or_read_without_end() {
    let root = tempfile::tempdir().unwrap();
    let events = Events::of_root(root.path());
    let happened = Event::now("c", EventAction::Exec);
    events.append(&happened);
    let hostile = events.open().unwrap();
    let mut byte = [0];
    let read = rustix::io::pread(&hostile, &mut byte, 0);
    assert_eq!(read, Err(rustix::io::Errno::BADF));
    flock(&hostile, FlockOperation::NonBlockingLockExclusive).unwrap();
    let mut reader = Reader::new(&events).unwrap();
    let one = std::slice::from_ref(&happened);
    assert_eq!(reader.next().unwrap(), one);
    // Sparse.
    hostile.set_len(1 << 40).unwrap();
    assert!(reader.next().unwrap().is_empty());
    events.append(&happened);
    assert!(events.old().metadata().unwrap().len() <= READ_MAX);
    assert!(events.log().metadata().unwrap().len() < SIZE_MAX);
    let read = Reader::new(&events).unwrap().next().unwrap();
    assert_eq!(read, one);
    // A follower goes on where the log begins anew.
    hostile.set_len(0).unwrap();
    assert!(reader.next().is_ok());
    events.append(&happened);
    assert_eq!(reader.next().unwrap(), one);
}

#[test]
fn an_end_that_nobody_told_is_told_once() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join(record::CONTAINERS).join("aaaaaaaaaaaa");
    fs::create_dir_all(&dir).unwrap();
    let record = sample("a", "one");
    note(&dir, &event(&record, EventAction::Start));
    note_end(&dir, &record);
    note_end(&dir, &record);
    let events = Events::of_root(root.path());
    let read = Reader::new(&events).unwrap().next().unwrap();
    let actions: Vec<_> = read.iter().map(|event| event.action).collect();
    assert_eq!(actions, [EventAction::Start, EventAction::Die]);
    assert_eq!(read[1].attributes["exitCode"], "137");
    // An end that the sandbox recorded is not recorded again.
    fs::remove_file(dir.join(END_LOGGED)).unwrap();
    note_end(&dir, &record);
    assert_eq!(Reader::new(&events).unwrap().next().unwrap().len(), 2);
}

#[test]
fn a_log_that_cannot_be_written_is_no_failure() {
    let events = Events::of_root(Path::new("/dev/null"));
    events.append(&Event::now("c", EventAction::Exec));
    assert!(Reader::new(&events).is_err());
}
