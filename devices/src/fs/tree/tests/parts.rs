//! Reads and writes of which the host does only a part.

use std::io;

use fuse_backend_rs::api::filesystem::{ZeroCopyReader, ZeroCopyWriter};
use fuse_backend_rs::common::file_traits::FileReadWriteVolatile;

use super::*;

/// Moves nothing, but says how much it moved: what each call returns, then an error.
struct Parts(Vec<usize>);

impl Parts {
    fn next(&mut self) -> io::Result<usize> {
        match self.0.is_empty() {
            true => Err(Errno::NOSPC.into()),
            false => Ok(self.0.remove(0)),
        }
    }
}

impl io::Read for Parts {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl io::Write for Parts {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Ok(0)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ZeroCopyReader for Parts {
    fn read_to(
        &mut self,
        _: &mut dyn FileReadWriteVolatile,
        _: usize,
        _: u64,
    ) -> io::Result<usize> {
        self.next()
    }
}

impl ZeroCopyWriter for Parts {
    fn write_from(
        &mut self,
        _: &mut dyn FileReadWriteVolatile,
        _: usize,
        _: u64,
    ) -> io::Result<usize> {
        self.next()
    }

    fn available_bytes(&self) -> usize {
        100
    }
}

fn parts(parts: &[usize]) -> Parts {
    Parts(parts.to_vec())
}

#[test]
fn what_a_cache_wrote_back_in_part_is_an_error() {
    let rig = rig();
    let make = creation(libc::O_RDWR, 0o10_0666);
    let (made, handle, ..) = rig.tree.create(&me(), ROOT, c"file", make).unwrap();
    let write = |from: &[usize], delayed| {
        let (handle, from) = (handle.unwrap(), &mut parts(from));
        let tree = &rig.tree;
        tree.write(&me(), made.inode, handle, from, 10, 0, None, delayed, 0, 0)
    };
    assert_eq!(write(&[4, 6], true).unwrap(), 10);
    assert_eq!(code(write(&[4], true)), Some(Errno::NOSPC));
    assert_eq!(code(write(&[4, 0], true)), Some(Errno::IO));
    // A program's own write is told of the part.
    assert_eq!(write(&[4], false).unwrap(), 4);
}

#[test]
fn less_than_was_asked_for_is_the_end_of_a_file_and_not_before_an_error() {
    let rig = rig();
    let make = creation(libc::O_RDWR, 0o10_0666);
    let (made, handle, ..) = rig.tree.create(&me(), ROOT, c"file", make).unwrap();
    let read = |to: &[usize]| {
        let (handle, to) = (handle.unwrap(), &mut parts(to));
        rig.tree.read(&me(), made.inode, handle, to, 10, 0, None, 0)
    };
    assert_eq!(read(&[10]).unwrap(), 10);
    assert_eq!(read(&[4, 6]).unwrap(), 10);
    assert_eq!(read(&[4, 0]).unwrap(), 4);
    assert_eq!(read(&[0]).unwrap(), 0);
    assert_eq!(code(read(&[4])), Some(Errno::NOSPC));
}

#[test]
fn a_list_read_in_pieces_goes_on_while_its_names_change() {
    let rig = rig();
    for number in 0..50 {
        std::fs::write(rig.path(&format!("file{number}")), "").unwrap();
    }
    let (handle, _) = rig.tree.opendir(&me(), ROOT, 0).unwrap();
    let of = (ROOT, handle.unwrap());
    let piece = |place: u64| {
        let mut seen = Vec::new();
        let mut add = |listed: DirEntry<'_>, _| {
            if seen.len() == 3 {
                return Ok(0);
            }
            seen.push((
                String::from_utf8(listed.name.to_vec()).unwrap(),
                listed.offset,
            ));
            Ok(100)
        };
        rig.tree
            .entries(&me(), of, (4096, place), false, &mut add)
            .unwrap();
        seen
    };
    let mut names = Vec::new();
    let mut place = 0;
    let first = piece(0);
    // The same place again, and then from the beginning.
    assert_eq!(piece(first[2].1), piece(first[2].1));
    assert_eq!(piece(0), first);
    // A place that does not exist changes nothing.
    let nowhere = rig
        .tree
        .entries(&me(), of, (4096, u64::MAX), false, &mut |_, _| Ok(100));
    assert_eq!(code(nowhere), Some(Errno::INVAL));
    assert_eq!(piece(first[2].1).len(), 3);
    assert_eq!(piece(0), first);
    loop {
        let seen = piece(place);
        let Some(last) = seen.last() else { break };
        place = last.1;
        names.extend(seen.into_iter().map(|(name, _)| name));
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 52, "{names:?}");
}
