// A button of the class `info` shows and hides the definition that it controls.
document.addEventListener('click', event => {
    const button = event.target.closest('.info');
    if (!button) return;
    const definition = document.getElementById(button.getAttribute('aria-controls'));
    definition.hidden = !definition.hidden;
    button.setAttribute('aria-expanded', String(!definition.hidden));
});
