//! Generates the messages, client and server of `proto/agent.proto` in pure Rust.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto/agent.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .include("proto")
        .input(PROTO)
        .rust_protobuf()
        .rust_protobuf_customize(
            ttrpc_codegen::ProtobufCustomize::default()
                .gen_mod_rs(false)
                .lite_runtime(true),
        )
        .customize(ttrpc_codegen::Customize {
            async_all: true,
            ..Default::default()
        })
        .run()?;
    // The generated files carry inner attributes, so they have to be files of modules.
    std::fs::write(
        out.join("generated.rs"),
        "pub mod agent;\npub mod agent_ttrpc;\n",
    )?;
    Ok(())
}
