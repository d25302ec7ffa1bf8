# Completion of gpt-lightning for bash 3.2 and newer, printed by `gpt-lightning completion bash`.
# ~/.local/share/bash-completion/completions/gpt-lightning is read at the first <Tab>.
_gpt_lightning_words() {
    command awk '@PROGRAM@' "$@" <<'@END@'
@TABLE@
@END@
}

_gpt_lightning() {
    local i word current files="" words=()
    # readline cuts --config=quick into three words
    for ((i = 1; i <= COMP_CWORD; i++)); do
        if [[ $i -gt 1 && (${COMP_WORDS[i]} == "=" || ${COMP_WORDS[i - 1]} == "=") ]]; then
            words[${#words[@]} - 1]+=${COMP_WORDS[i]}
        else
            words+=("${COMP_WORDS[i]}")
        fi
    done
    current=${words[${#words[@]} - 1]}
    [[ $current == --*=* ]] && current=${current#*=}
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        if [[ $word == @file ]]; then
            files=1
        elif [[ $word == "$current"* ]]; then
            COMPREPLY+=("$word")
        fi
    done < <(_gpt_lightning_words "${words[@]}")
    if [[ -z $files ]]; then
        compopt +o default 2>/dev/null # bash 3.2 lacks compopt
    elif [[ ${#COMPREPLY[@]} -gt 0 ]]; then # without a word, readline itself completes paths
        while IFS= read -r word; do
            COMPREPLY+=("$(printf %q "$word")$([[ -d $word ]] && echo /)")
        done < <(compgen -f -- "$current")
        [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == */ ]] && compopt -o nospace 2>/dev/null
    fi
    return 0
}

complete -o default -F _gpt_lightning gpt-lightning
