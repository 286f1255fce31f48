//! The header by which a client asks for part of an exported disk.

use podvisor_disk_streams::range::Asked;

/// The beginning of an input: how long the disk is.
const LENGTH: usize = 8;

/// A part that is asked for exists, and is the same when it is asked for again.
pub fn run(data: &[u8]) {
    let Some((length, value)) = data.split_first_chunk::<LENGTH>() else {
        return;
    };
    let length = u64::from_le_bytes(*length);
    // Few inputs have the right beginning by chance.
    for value in [value, &[b"bytes=", value].concat()] {
        if let Asked::Part(part) = Asked::of(value, length) {
            assert!(part.start < part.end && part.end <= length);
            let again = format!("bytes={}-{}", part.start, part.end - 1);
            assert_eq!(Asked::of(again.as_bytes(), length), Asked::Part(part));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_part_of_a_disk_exists_or_is_not_sent() {
        crate::smoke::run("disk_range", super::run);
    }
}
