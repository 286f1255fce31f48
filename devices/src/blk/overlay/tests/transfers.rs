//! When and how clusters and tables are read and written.

use super::*;
use crate::blk::overlay::tables::Place;

#[test]
fn adjacent_clusters_are_transferred_at_once() {
    let mut rig = Rig::new(&numbered(16 << 16));
    // The table comes first. Then two ranges of the disk that are one in the file, and one before
    // them that comes later.
    rig.write(15 << 16, &[9; 512]);
    rig.write(2 << 16, &[1; 4 << 16]);
    rig.write(6 << 16, &[2; 2 << 16]);
    rig.write(1 << 16, &[3; 1 << 16]);
    let disk = rig.disk.as_mut().unwrap();
    let mut run = |at: u64, most: u64| disk.run_at(at, most);
    let (place, len) = run((2 << 16) + 512, 14 << 16);
    assert_eq!(len, (6 << 16) - 512);
    let Place::File(at) = place else {
        panic!("it was written: {place:?}");
    };
    assert_eq!(at % CLUSTER, 512);
    assert_eq!(run(2 << 16, 512), (Place::File(at - 512), 512));
    let before = Place::File(at - 512 + (6 << 16));
    assert_eq!(run(1 << 16, 3 << 16), (before, 1 << 16));
    assert_eq!(run(8 << 16, 8 << 16), (Place::Base, 7 << 16));
    assert_eq!(run(0, 16 << 16), (Place::Base, 1 << 16));
}

#[test]
fn while_memory_has_room_for_tables_only_a_flush_writes_them() {
    let at = |table: u64| table * ENTRIES * CLUSTER;
    let mut rig = Rig::sparse(3 * ENTRIES * CLUSTER);
    let mem = rig.mem.clone();
    for table in [0, 1, 2, 0] {
        rig.write(at(table), &[1; 512]);
        assert_eq!(rig.read(at(table) + CLUSTER, 512), [0; 512]);
    }
    let mut killed = rig.killed();
    for table in 0..3 {
        let bytes = read(&mut killed, &mem, at(table), 512).unwrap();
        assert!(bytes == [0; 512], "table {table} is written");
    }
    drop(killed);
    rig.flush();
    let mut killed = rig.killed();
    for table in 0..3 {
        let bytes = read(&mut killed, &mem, at(table), 512).unwrap();
        assert!(bytes == [1; 512], "table {table} is missing");
    }
}
