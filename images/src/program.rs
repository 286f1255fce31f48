//! Root file systems of one program, without an image to pull.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};

use crate::erofs::{WriteError, Writer};
use crate::tree::{Leaf, Meta, Tree};

/// Writes the EROFS file system whose only file is the executable `/NAME` with these bytes into
/// `file`, which should be empty.
///
/// # Errors
/// [`WriteError`]: `file` cannot be written.
pub fn write_program_rootfs(
    mut file: File,
    name: &str,
    program: &[u8],
) -> std::result::Result<(), WriteError> {
    file.seek(SeekFrom::Start(0))?;
    let meta = Meta {
        mode: 0o755,
        ..Meta::default()
    };
    let mut writer = Writer::new(file);
    let mut data = writer.add_file(program.len() as u64, &meta)?;
    data.write(program)?;
    let content = data.finish()?;
    let mut tree = Tree::new();
    // A tree with room for two names refuses neither.
    let put = tree
        .put_dir(&[], meta.clone())
        .and_then(|()| tree.put_leaf(&[name.as_bytes()], meta, Leaf::File(content)));
    put.map_err(std::io::Error::other)?;
    writer.finish(&tree, [0; 16])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::erofs::reader;

    #[test]
    fn the_program_is_its_only_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rootfs");
        write_program_rootfs(File::create(&path).unwrap(), "true", b"\x7fELF...").unwrap();
        let files = reader::read(&std::fs::read(path).unwrap());
        let names: Vec<_> = files.keys().map(|name| name.as_slice()).collect();
        assert_eq!(names, [&b""[..], b"true"]);
        let program = &files[&b"true"[..]];
        assert_eq!(program.mode & 0o7777, 0o755);
        assert_eq!(program.data, b"\x7fELF...");
    }
}
