// Films play while they are in view, and stay still for people who asked for less motion.
(() => {
  if (!("IntersectionObserver" in window) || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) target.play().catch(() => {});
      else target.pause();
    }
  }, { threshold: 0.5 });
  document.querySelectorAll("video").forEach((film) => watch.observe(film));
})();
