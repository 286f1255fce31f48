//! The data of a disk that another namespace's pod sends.

use podvisor_disk_streams::blocks::{Reader, header, push_block, push_end};

/// The beginning of an input: how long the disk is.
const LENGTH: usize = 4;

/// Blocks that are accepted are in order and within their disk, and the same once they are written
/// again.
pub fn run(data: &[u8]) {
    let _ = read(data);
    // Few inputs have the right beginning by chance.
    let Some((length, rest)) = data.split_first_chunk::<LENGTH>() else {
        return;
    };
    let mut stream = header(u32::from_le_bytes(*length).into());
    stream.extend(rest);
    let Some((disk, blocks)) = read(&stream) else {
        return;
    };
    let mut again = header(disk);
    let mut end = 0;
    for (at, block) in &blocks {
        assert!(*at >= end && !block.is_empty());
        end = at + block.len() as u64;
        push_block(&mut again, *at, block);
    }
    assert!(end <= disk);
    push_end(&mut again);
    assert_eq!(again, stream);
}

/// A disk's length and its blocks.
type Disk = (u64, Vec<(u64, Vec<u8>)>);

fn read(stream: &[u8]) -> Option<Disk> {
    let mut reader = Reader::new(stream).ok()?;
    let mut blocks = Vec::new();
    while let Some((at, block)) = reader.next_block().ok()? {
        blocks.push((at, block.to_vec()));
    }
    Some((reader.disk_len(), blocks))
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_blocks_are_within_their_disk_or_refused() {
        crate::smoke::run("disk_blocks", super::run);
    }
}
