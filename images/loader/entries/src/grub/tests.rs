//! The subset, command by command; whole files of distributions are in `tests/`.

use super::*;
use crate::memory::MemoryVolumes;
use crate::uki::example;
use proptest::prelude::*;

fn load_with(text: &str, files: &[(&str, &[u8])]) -> Result<BootEntry, GrubError> {
    let mut all = vec![("boot/grub/grub.cfg", text.as_bytes())];
    all.extend(files);
    let volumes = MemoryVolumes::new()
        .ext4("aaaa", &all)
        .ext4("bbbb", &[("marker", b"x")]);
    load(&Files::new(&volumes), VolumeId(0), "boot/grub/grub.cfg")
}

fn entry(text: &str) -> BootEntry {
    load_with(text, &[]).unwrap()
}

/// The command line that a condition chooses: `yes` or `no`.
fn condition(condition: &str) -> String {
    entry(&format!(
        "set one=1\nset empty=\nif {condition}; then set x=yes\nelse set x=no\nfi\nmenuentry m {{ linux /k $x\n}}\n"
    ))
    .cmdline
}

fn error(text: &str) -> GrubError {
    load_with(text, &[]).unwrap_err()
}

#[test]
fn the_default_is_a_number_an_id_a_title_or_a_path_of_them() {
    let menu = "menuentry 'A' --id a { linux /a\n}\n\
                submenu 'More' --id m { menuentry 'B' --id b { linux /b\n}\n menuentry 'C' { linux /c\n} }\n";
    for (default, kernel) in [
        ("0", "a"),
        ("a", "a"),
        ("A", "a"),
        ("1>1", "c"),
        ("m>b", "b"),
        ("More>C", "c"),
        ("1", "b"),
        ("9", "a"),
        ("unknown", "a"),
        ("unknown>C", "a"),
    ] {
        let found = entry(&format!("set default=\"{default}\"\n{menu}"));
        assert_eq!(found.kernel.path, kernel, "default {default}");
    }
}

#[test]
fn conditions_are_evaluated_as_grub_does() {
    for (text, expected) in [
        ("[ x$one = x1 ]", "yes"),
        ("[ \"${one}\" != 1 ]", "no"),
        ("[ \"$empty\" ]", "no"),
        ("[ -z \"$empty\" ]", "yes"),
        ("[ -z $empty ]", "yes"),
        ("[ -n \"$one\" -a ! -f /none ]", "yes"),
        ("[ \"$empty\" = 1 -o \"$one\" = 1 ]", "yes"),
        ("[ $one -gt 0 ]", "yes"),
        ("[ 2 -lt 10 ]", "yes"),
        ("test -f /boot/grub/grub.cfg", "yes"),
        ("[ -s $prefix/grub.cfg ]", "yes"),
        ("[ -d /boot ]", "yes"),
        ("[ -e (hd0,gpt2)/marker ]", "yes"),
        ("[ -f (hd7,1)/marker ]", "no"),
        ("loadfont unicode", "no"),
        ("true", "yes"),
        ("false", "no"),
        ("[ \"$grub_platform\" = efi ]", "no"),
        ("search --fs-uuid BBBB", "yes"),
        ("search --label none", "no"),
    ] {
        assert_eq!(condition(text), expected, "{text}");
    }
}

#[test]
fn a_search_changes_the_root() {
    for search in [
        "search --no-floppy --fs-uuid --set=root bbbb",
        "search --no-floppy --fs-uuid --set bbbb",
        "search --fs-uuid bbbb --set found\nset root=$found",
        "search --fs-uuid -s --no-floppy bbbb",
        "search --set=root --hint-bios=hd0,gpt9 --file /marker",
        "search.fs_uuid bbbb root hd0,gpt1",
        "set root='hd0,gpt2'",
        "set root=(hd0,2)\nset root=hd0,msdos2",
    ] {
        let found = entry(&format!(
            "menuentry x {{\n{search}\nlinux /k a\ninitrd /i /j\n}}\n"
        ));
        assert_eq!(
            found.kernel,
            crate::FileRef::whole(VolumeId(1), "k"),
            "{search}"
        );
        assert_eq!(found.initrds.len(), 2);
    }
}

#[test]
fn functions_have_arguments_and_variables_are_split() {
    let found = entry(
        "function f {\n set args=\"a  $1 $2\"\n}\nset two='b c'\nf x 'y z'\n\
         menuentry --class os 'T' $menuentry_id_option { linux /k$none $args \"q $one\" $two end\n}\n",
    );
    assert_eq!(found.cmdline, "a x y z \"q \" b c end");
    assert_eq!(found.title, "T");
}

#[test]
fn the_environment_block_is_read_and_never_written() {
    let env = b"# GRUB Environment Block\nsaved_entry=b\nkernelopts=root=x ro\n####";
    let text = "if [ -s $prefix/grubenv ]; then\nload_env\nfi\nset default=\"${saved_entry}\"\nsave_env default\n\
                menuentry A { linux /a\n}\nmenuentry B --id b { linux /b $kernelopts\n}\n";
    let found = load_with(text, &[("boot/grub/grubenv", env)]).unwrap();
    assert_eq!(
        (found.kernel.path.as_str(), found.cmdline.as_str()),
        ("b", "root=x ro")
    );
}

#[test]
fn files_are_included_or_replace_the_menu() {
    let other = b"set default=1\nmenuentry X { linux /x\n}\nmenuentry Y { linux /y\n}\n";
    let files: &[(&str, &[u8])] = &[("other.cfg", other)];
    let found = load_with("menuentry W { linux /w\n}\nsource /other.cfg\n", files).unwrap();
    assert_eq!(
        found.kernel.path, "x",
        "a default of the included file counts"
    );
    let found = load_with(
        "set default=0\nmenuentry W { linux /w\n}\nconfigfile /other.cfg\n",
        files,
    );
    assert_eq!(found.unwrap().kernel.path, "y");
    let found = load_with("menuentry W { configfile /other.cfg\n}\n", files);
    assert_eq!(found.unwrap().kernel.path, "y");
    let found = load_with(
        "source /none\nconfigfile /none\nmenuentry W { linux /w\n}\n",
        files,
    );
    assert_eq!(
        found.unwrap().kernel.path,
        "w",
        "missing files are passed over"
    );
}

#[test]
fn loops_are_errors_that_name_file_and_line() {
    let same = error("\n\nsource /boot/grub/grub.cfg\n");
    assert_eq!(same.line, 3);
    assert!(
        same.to_string().contains("line 3 of boot/grub/grub.cfg"),
        "{same}"
    );
    assert!(same.to_string().contains("includes itself"), "{same}");
    let menu = error("menuentry x { configfile /boot/grub/grub.cfg\n}\n");
    assert!(menu.to_string().contains("includes itself"), "{menu}");
    let found = load_with(
        "configfile /b.cfg\n",
        &[("b.cfg", b"\nconfigfile /boot/grub/grub.cfg\n")],
    );
    assert!(found.unwrap_err().to_string().contains("includes itself"));
    assert_eq!(
        error("\nwhile true; do\n echo\ndone\n").kind,
        GrubErrorKind::Loop("while".to_owned())
    );
    assert_eq!(error("function f { f\n}\nf\n").kind, GrubErrorKind::Nesting);
    let text = "function a { true\n}\n".to_owned()
        + &(0..20).fold(String::new(), |text, n| {
            let previous = if n == 0 {
                "a".to_owned()
            } else {
                format!("f{}", n - 1)
            };
            format!("{text}function f{n} {{ {previous}; {previous}; {previous}; {previous}\n}}\n")
        })
        + "f19\n";
    assert!(
        matches!(error(&text).kind, GrubErrorKind::Quota(_)),
        "exponential work"
    );
    let text = format!(
        "set a=xxxxxxxxxxxxxxxx\n{}",
        "set a=\"$a$a$a$a\"\n".repeat(40)
    );
    assert!(
        matches!(error(&text).kind, GrubErrorKind::Quota(_)),
        "exponential text"
    );
    let text = "menuentry a { linux /k\n}\n".repeat(5000);
    assert!(
        matches!(error(&text).kind, GrubErrorKind::Quota(_)),
        "entries by the thousand"
    );
}

#[test]
fn only_what_is_executed_must_be_in_the_subset() {
    let found = entry(
        "if false; then frobnicate\nfi\nmenuentry a { linux /k\n}\nmenuentry b { chainloader +1\n}\n",
    );
    assert_eq!(found.kernel.path, "k");
    assert_eq!(
        error("\nfrobnicate x\n").kind,
        GrubErrorKind::Command("frobnicate".to_owned())
    );
    let chained = error("menuentry Windows {\n chainloader /EFI/x.efi\n}\n");
    assert_eq!(chained.line, 2);
    assert!(
        chained.to_string().contains("needs a firmware"),
        "{chained}"
    );
    assert_eq!(
        error("menuentry a { true\n}\n").kind,
        GrubErrorKind::NoKernel("a".to_owned())
    );
    assert_eq!(error("echo\n").kind, GrubErrorKind::NoEntry);
    let up = error("menuentry a {\n linux /../etc/shadow\n}\n").kind;
    assert!(matches!(up, GrubErrorKind::Path(_)), "{up:?}");
    assert!(matches!(
        error("menuentry a { linux (hd3)/k\n}").kind,
        GrubErrorKind::Device(_)
    ));
}

#[test]
fn a_chained_unified_image_is_a_kernel() {
    let image = example(&[(".linux", b"kernel"), (".cmdline", b"quiet")]);
    let text = "menuentry a { chainloader /EFI/Linux/a.efi\n}\n";
    let found = load_with(text, &[("EFI/Linux/a.efi", &image)]).unwrap();
    assert_eq!(found.cmdline, "quiet");
    assert!(found.kernel.part.is_some());
}

proptest! {
    #[test]
    fn any_text_ends_without_a_panic(text in "([a-z0-9=$\\{}\\[\\]\"';\n -]|if |then\n|fi\n|menuentry |linux /|set |\\}\n|\\{ ){0,60}") {
        let _ = load_with(&text, &[]);
    }
}
