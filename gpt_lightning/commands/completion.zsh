#compdef gpt-lightning
# Completion of gpt-lightning for zsh, printed by `gpt-lightning completion zsh`.
# A file _gpt-lightning in a folder of $fpath is read at the first <Tab>.
_gpt_lightning_words() {
    command awk '@PROGRAM@' "$@" <<'@END@'
@TABLE@
@END@
}

_gpt-lightning() {
    local line files ret=1
    local -a found
    local -a typed=("${(@)words[2,CURRENT-1]}" "$PREFIX")
    [[ $PREFIX == --*=* ]] && compset -P 1 '*='
    while IFS= read -r line; do
        if [[ $line == @file ]]; then
            files=1
        else
            line=${${line//:/\\:}/$'\t'/:}
            found+=("${line%:}")
        fi
    done < <(_gpt_lightning_words "${(@)typed}")
    (( $#found )) && _describe 'gpt-lightning' found && ret=0
    [[ -n $files ]] && _files && ret=0
    return ret
}

if [[ $funcstack[1] == _gpt-lightning ]]; then
    _gpt-lightning "$@"
else # the file was sourced
    compdef _gpt-lightning gpt-lightning
fi
