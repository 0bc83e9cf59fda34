// Connects this Pi to Reef. Endpoint and token come from the environment at start and are never stored.
export default function (pi: any) {
  const env = process.env;
  if (!env.REEF_BASE_URL) return;
  const model = env.REEF_MODEL || "default";
  pi.registerProvider("reef", {
    baseUrl: `${env.REEF_BASE_URL}/v1`,
    apiKey: env.REEF_TOKEN || "none",
    api: "openai-completions",
    models: [
      {
        id: model,
        name: model,
        reasoning: false,
        input: ["text"],
        cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
        contextWindow: Number(env.REEF_CONTEXT_WINDOW || 128000),
        maxTokens: Number(env.REEF_MAX_TOKENS || 16384),
        compat: { supportsDeveloperRole: false, supportsStore: false },
      },
    ],
  });
  pi.on("session_start", (_event: any, ctx: any) => {
    const notice = env.REEF_NOTICE;
    if (!notice) return;
    if (ctx.hasUI) {
      ctx.ui.notify(notice, "info");
      ctx.ui.setStatus("reef", "reef: update available");
    } else console.error(notice);
  });
}
